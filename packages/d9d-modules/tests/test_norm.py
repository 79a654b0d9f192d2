import pytest
import torch
from torch.nn import functional as F

import d9d_modules.norm
from d9d_dist import UserError
from d9d_modules import GatedRMSNorm, LayerNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_equal_torch_rms_norm(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 7, 24, dtype=dtype, requires_grad=True)
    gradient = torch.randn(3, 7, 24, dtype=dtype)
    expected = F.rms_norm(x, (24,), norm.weight, 1e-5)
    wanted = torch.autograd.grad(expected, (x, norm.weight), gradient)
    got = torch.autograd.grad(norm(x), (x, norm.weight), gradient)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_equals_torch_and_adds_a_residual_first(bias: bool) -> None:
    norm, theirs = LayerNorm(24, eps=1e-3, bias=bias), torch.nn.LayerNorm(24, eps=1e-3, bias=bias)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    norm.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(2, 3, 7, 24)
    assert torch.equal(norm(x), theirs(x))
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, theirs(total))
    norm.reset_parameters()
    assert torch.equal(norm(x), F.layer_norm(x, (24,), eps=1e-3))


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


def test_a_zero_centered_weight_is_initialized_to_zero_and_offset_by_one() -> None:
    norm = RMSNorm(16, zero_centered=True).double()
    assert torch.equal(norm.weight, torch.zeros(16, dtype=torch.float64))
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight + 1.0, 1e-6))
    norm.reset_parameters()
    assert norm.weight.eq(0).all()


def test_a_small_zero_centered_weight_is_not_rounded_away() -> None:
    norm = RMSNorm(64, zero_centered=True).bfloat16()
    torch.nn.init.constant_(norm.weight, 2**-9)  # 1 + 2 ** -9 is 1 in bfloat16
    x = torch.randn(8, 64).bfloat16()
    unit = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.equal(norm(x), (unit * (1.0 + 2**-9)).bfloat16())
    assert not torch.equal(norm(x), unit.bfloat16())


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_with_a_residual_returns_the_norm_of_the_sum_and_the_sum(zero_centered: bool) -> None:
    norm = RMSNorm(8, zero_centered=zero_centered).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@pytest.mark.parametrize("kernel", [False, True])
def test_wrong_shapes_raise(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm(8)
    monkeypatch.setattr(d9d_modules.norm, "has_kernel", lambda x: kernel)  # the checks come before the kernel
    with pytest.raises(UserError, match=r"RMS norm of size 8 got a tensor of shape \(2, 1\); expected a last dim of 8"):
        norm(torch.randn(2, 1))
    with pytest.raises(UserError, match=r"RMS norm of size 8 got a tensor of shape \(2, 4\)"):
        norm(torch.randn(2, 4), torch.randn(2, 4))
    with pytest.raises(
        UserError, match=r"residual has shape \(1, 8\) and dtype torch.float32; expected .* \(2, 8\) and"
    ):
        norm(torch.randn(2, 8), torch.randn(1, 8))


def test_outputs_and_gradients_of_a_gated_norm_equal_torch_rms_norm_times_silu() -> None:
    norm = GatedRMSNorm(6, eps=0.1).double()
    assert norm.weight.eq(1).all()
    torch.nn.init.normal_(norm.weight)
    x, gate = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, expected = norm(x, gate), F.rms_norm(x, (6,), norm.weight, 0.1) * gate * gate.sigmoid()
    torch.testing.assert_close(found, expected)
    leaves, direction = (x, gate, norm.weight), torch.randn_like(found)
    wanted = torch.autograd.grad(expected, leaves, direction)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, direction), wanted)


def test_reset_parameters_of_a_gated_norm_sets_ones() -> None:
    norm = GatedRMSNorm(6)
    torch.nn.init.normal_(norm.weight)
    norm.reset_parameters()
    assert norm.weight.eq(1).all()
