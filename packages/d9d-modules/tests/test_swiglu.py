import torch

from d9d_modules import SwiGLU


def test_is_the_equation() -> None:
    block = SwiGLU(6, 10, init_std=1.0).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate = x @ block.gate_proj.weight.T
    up = x @ block.up_proj.weight.T
    expected = (gate / (1 + (-gate).exp()) * up) @ block.down_proj.weight.T
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)
    assert expected.abs().max() > 0.1
