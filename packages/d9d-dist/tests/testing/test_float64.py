import torch

from d9d_dist.testing import KeepFloat64


def test_only_conversions_from_float64_are_changed() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with KeepFloat64():
        y = (x.float() * 3).softmax(-1, dtype=torch.float32).to(torch.float32)
        y.square().sum().backward()
        assert torch.arange(3).float().dtype == torch.float32
        assert torch.ones(3).bfloat16().float().dtype == torch.float32
    expected = x.detach().clone().requires_grad_()
    z = (expected * 3).softmax(-1)
    z.square().sum().backward()
    assert torch.equal(y, z)
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)
    assert x.float().dtype == torch.float32
