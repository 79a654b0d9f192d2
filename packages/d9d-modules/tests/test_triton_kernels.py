"""Triton kernels compared with float64 references: on an accelerator, and on the CPU through Triton's interpreter.

Triton selects the interpreter at import, so a separate process runs the tests of this file.
The interpreter truncates to bfloat16 instead of rounding, so 16-bit results may be off by one unit in the last place.
"""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.testing import run_tests_interpreted
from d9d_modules.norm import add_rms_norm, rms_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("accelerator", marks=pytest.mark.gpu)]
SHAPES = [(3, 5), (2, 7, 100), (0, 8), (5, 1), (300, 33), (2, 4096)]
NORMS = [(shape, bool(i % 2)) for i, shape in enumerate(SHAPES)]  # (shape, zero_centered)
# In 16 bits the last rounding counts. In float32 the errors of a sum of 4096 terms add up like a random walk to 64 eps;
# 2.5 times that is allowed.
TOLERANCE = {
    torch.float32: 2.5 * 64 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    run_tests_interpreted(__file__, num_passed=15)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def _check(
    kernel: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    *,
    tolerance: float,
) -> None:
    """Compare outputs and all gradients with those of the reference in float64."""
    wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
    outputs, expected = kernel(*inputs), reference(*wide)
    gradients = [torch.randn_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, inputs, gradients)
    wanted = torch.autograd.grad(expected, wide, [gradient.double().cpu() for gradient in gradients])
    for got, want, like in zip((*outputs, *found), (*expected, *wanted), (*outputs, *inputs), strict=True):
        assert got.shape == want.shape
        assert got.dtype == like.dtype
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance * scale)


def _draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def test_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    from d9d_modules import _triton_rms_norm  # noqa: PLC0415  (imports Triton)

    def kernel(x: Tensor, weight: Tensor, *, zero_centered: bool) -> tuple[Tensor]:
        return (_triton_rms_norm.rms_norm(x, weight, eps=1e-5, zero_centered=zero_centered),)

    def reference(x: Tensor, weight: Tensor, *, zero_centered: bool) -> tuple[Tensor]:
        return (F.rms_norm(x, x.shape[-1:], weight + 1.0 if zero_centered else weight, 1e-5),)

    for shape, zero_centered in NORMS:
        inputs = [_draw(shape, dtype, device), _draw(shape[-1:], dtype, device)]
        kernels = (partial(function, zero_centered=zero_centered) for function in (kernel, reference))
        _check(*kernels, inputs, tolerance=TOLERANCE[dtype])


def test_add_rms_norm(device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from d9d_modules import _triton_rms_norm  # noqa: PLC0415

    monkeypatch.setattr(
        _triton_rms_norm, "_PROGRAMS_PER_MULTIPROCESSOR", 2
    )  # each program processes several tiles of rows

    def kernel(x: Tensor, residual: Tensor, weight: Tensor, *, zero_centered: bool) -> tuple[Tensor, Tensor]:
        return _triton_rms_norm.add_rms_norm(x, residual, weight, eps=1e-5, zero_centered=zero_centered)

    def reference(x: Tensor, residual: Tensor, weight: Tensor, *, zero_centered: bool) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, x.shape[-1:], weight + 1.0 if zero_centered else weight, 1e-5), total

    for shape, zero_centered in NORMS:
        inputs = [_draw(shape, dtype, device), _draw(shape, dtype, device), _draw(shape[-1:], dtype, device)]
        kernels = (partial(function, zero_centered=zero_centered) for function in (kernel, reference))
        _check(*kernels, inputs, tolerance=4 * TOLERANCE[dtype])


def test_silu_mul(device: torch.device, dtype: torch.dtype) -> None:
    from d9d_modules import _triton_silu_mul  # noqa: PLC0415

    def kernel(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (_triton_silu_mul.silu_mul(gate, up),)

    def reference(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (gate / (1.0 + (-gate).exp()) * up,)

    for shape in SHAPES:
        _check(kernel, reference, [_draw(shape, dtype, device) for _ in range(2)], tolerance=TOLERANCE[dtype])


def test_inputs_and_gradients_need_not_be_contiguous(device: torch.device) -> None:
    from d9d_modules import _triton_rms_norm, _triton_silu_mul  # noqa: PLC0415

    x, residual = (torch.randn(6, 7, 4, device=device).permute(2, 0, 1)[:, ::2].requires_grad_() for _ in range(2))
    weight = torch.randn(14, device=device)[::2].requires_grad_()
    assert not x.is_contiguous()

    def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        normed, total = _triton_rms_norm.add_rms_norm(x, residual, weight, eps=1e-5, zero_centered=False)
        alone = _triton_rms_norm.rms_norm(x, weight, eps=1e-5, zero_centered=False)
        return normed.mT, total.mT, alone.mT, _triton_silu_mul.silu_mul(x, residual).mT

    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        normed, total = add_rms_norm(x, residual, weight, eps=1e-5)
        return normed.mT, total.mT, rms_norm(x, weight, eps=1e-5).mT, (F.silu(x) * residual).mT

    _check(kernel, reference, [x, residual, weight], tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("kept", [0, 1])
def test_one_of_two_outputs_may_be_unused(device: torch.device, kept: int) -> None:
    from d9d_modules import _triton_rms_norm  # noqa: PLC0415

    weight = _draw((8,), torch.float32, device)

    def kernel(x: Tensor, residual: Tensor) -> tuple[Tensor]:
        return (_triton_rms_norm.add_rms_norm(x, residual, weight, eps=1e-5, zero_centered=False)[kept],)

    def reference(x: Tensor, residual: Tensor) -> tuple[Tensor]:
        return (add_rms_norm(x, residual, weight.double().cpu(), eps=1e-5)[kept],)

    _check(
        kernel, reference, [_draw((3, 8), torch.float32, device) for _ in range(2)], tolerance=TOLERANCE[torch.float32]
    )


def test_a_frozen_weight_gets_no_gradient_and_equal_inputs_give_equal_bits(device: torch.device) -> None:
    from d9d_modules import _triton_rms_norm  # noqa: PLC0415

    x, weight = _draw((700, 24), torch.float32, device), _draw((24,), torch.float32, device)

    def gradients(*needed: Tensor) -> tuple[Tensor, ...]:
        y = _triton_rms_norm.rms_norm(x, weight, eps=1e-5, zero_centered=False)
        return torch.autograd.grad(y.square().sum(), needed)

    first, second = gradients(x, weight), gradients(x, weight)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    weight.requires_grad_(False)
    assert torch.equal(gradients(x)[0], first[0])


@pytest.mark.parametrize("part", ["inputs", "weights"])
def test_input_and_weight_gradients_can_be_computed_separately(device: torch.device, part: str) -> None:
    from d9d_modules import _triton_rms_norm  # noqa: PLC0415

    x, weight = _draw((9, 24), torch.float32, device), _draw((24,), torch.float32, device)
    needed = x if part == "inputs" else weight
    y = _triton_rms_norm.rms_norm(x, weight, eps=1e-5, zero_centered=False)
    expected = rms_norm(x.double().cpu(), weight.double().cpu(), eps=1e-5)
    (found,) = torch.autograd.grad(y.sin().sum(), needed, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), needed)
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)
