import torch
from torch import Tensor, nn

from d9d_dist.testing import KeepFloat64, in_float64


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


class _RoundsToFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() / x).to(self.weight.dtype)


def test_a_copy_runs_in_float64() -> None:
    model, x = _RoundsToFloat32(), torch.tensor([3.0, 7.0])
    assert torch.equal(in_float64(model, x), torch.tensor([1 / 3, 3 / 7], dtype=torch.float64))
    assert model.weight.dtype == torch.float32
