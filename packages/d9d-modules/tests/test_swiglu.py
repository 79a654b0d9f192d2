import math

import pytest
import torch

from d9d_dist import UserError
from d9d_modules import SwiGLU
from d9d_modules.swiglu import GeGLU, silu_mul


def test_swiglu_equals_its_equation() -> None:
    block = SwiGLU(6, 10, init_std=1.0).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate = x @ block.gate_proj.weight.T
    up = x @ block.up_proj.weight.T
    expected = (gate / (1 + (-gate).exp()) * up) @ block.down_proj.weight.T
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)
    assert expected.abs().max() > 0.1


def test_geglu_equals_its_equation() -> None:
    block = GeGLU(6, 10, init_std=1.0).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate = x @ block.gate_proj.weight.T
    gelu = gate / 2 * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh())
    expected = (gelu * (x @ block.up_proj.weight.T)) @ block.down_proj.weight.T
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)
    assert block.tensor_plan("x").keys() == SwiGLU(6, 10).tensor_plan("x").keys()


def test_gate_and_up_must_match() -> None:
    with pytest.raises(
        UserError, match=r"gate has shape \(2, 3\) .* up has \(2, 1\) and torch.float32; expected the same"
    ):
        silu_mul(torch.randn(2, 3), torch.randn(2, 1))
    with pytest.raises(UserError, match=r"up has \(2, 3\) and torch.float64; expected the same shape and dtype"):
        silu_mul(torch.randn(2, 3), torch.randn(2, 3).double())
