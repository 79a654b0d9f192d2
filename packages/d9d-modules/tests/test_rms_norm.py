import pytest
import torch
from torch.nn import functional as F

from d9d_modules import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 7, 24, dtype=dtype, requires_grad=True)
    gradient = torch.randn(3, 7, 24, dtype=dtype)
    expected = F.rms_norm(x, (24,), norm.weight, 1e-5)
    wanted = torch.autograd.grad(expected, (x, norm.weight), gradient)
    got = torch.autograd.grad(norm(x), (x, norm.weight), gradient)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(got, wanted)


def test_float64_is_not_rounded_to_float32() -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(RMSNorm(16).double()(x), expected, rtol=1e-14, atol=0)


def test_bfloat16_is_rounded_once() -> None:
    norm = RMSNorm(64).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = 1000 * torch.randn(4, 64).bfloat16()
    wide = RMSNorm(64)
    wide.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), wide(x.float()).bfloat16())


def test_reset_parameters_sets_ones() -> None:
    norm = RMSNorm(8)
    torch.nn.init.normal_(norm.weight)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(8))
