"""RMS norm with an optional residual add: one fused Triton kernel forward and one backward.

Arithmetic is in float32; 16-bit dtypes are used only for loads and stores. Forward saves its input and the inverse RMS
of each row.

Backward reads the input and the gradient once and computes the gradients of both the input and the weight. Each program
accumulates the weight gradient over its rows; the partial sums are then added in a fixed order. The number of programs
depends only on the shape and the device, so results are bitwise reproducible on devices of the same kind.

Shape legend: N rows, D size of a row, P programs.
"""

# Kernel arguments are positional pointers and numbers without Python types.
# ruff: noqa: ANN001, ANN202, PLR0917

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_modules.triton_jit import jit, num_multiprocessors, threads_per_warp

_TILE = 2**12
"""Number of elements in a program's tile of rows; a longer row is a tile by itself."""

_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Maximum number of backward programs per multiprocessor; each writes one row of partial sums."""


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    """Compute `d9d_modules.rms_norm`; `x` may have any strides. A program keeps whole rows in registers."""
    normed: Tensor = _RMSNorm.apply(x, None, weight_D, eps, zero_centered)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, *, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of `x + residual` and the sum, both in the dtype of `x`; see `d9d_modules.add_rms_norm`."""
    normed, total = _RMSNorm.apply(x, residual, weight_D, eps, zero_centered)
    return normed, total


class _RMSNorm(torch.autograd.Function):
    """RMS norm of `x`, or of `x + residual`, and then also the sum.

    A split backward does not defer the weight gradient, which the kernel computes at little extra cost.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float, zero_centered: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_ND, residual_ND = (
            None if each is None else each.reshape(-1, x.shape[-1]).contiguous() for each in (x, residual)
        )
        assert x_ND is not None
        normed_ND, total_ND, inverse_rms_N = _forward(x_ND, residual_ND, weight_D, eps, zero_centered)
        ctx.save_for_backward(total_ND, weight_D, inverse_rms_N)
        ctx.zero_centered = zero_centered
        normed = normed_ND.view(x.shape)
        return normed if residual is None else (normed, total_ND.view(x.shape))

    @staticmethod
    @first_derivative_only("the Triton kernel of RMSNorm")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight_D = _backward(ctx, *gradients, with_weight=ctx.needs_input_grad[2])
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight_D, None, None


def _forward(
    x_ND: Tensor, residual_ND: Tensor | None, weight_D: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized rows, the rows before the norm (`x + residual`), and the inverse RMS of each row."""
    num_rows, size = x_ND.shape
    normed_ND = torch.empty_like(x_ND)
    total_ND = x_ND if residual_ND is None else torch.empty_like(x_ND)
    inverse_rms_N = torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    block, rows = _tile(size)
    if x_ND.numel():
        _forward_kernel[(-(-num_rows // rows),)](
            x_ND,
            residual_ND,
            weight_D.contiguous(),
            normed_ND,
            total_ND,
            inverse_rms_N,
            num_rows,
            size,
            eps,
            ZERO_CENTERED=zero_centered,
            HAS_RESIDUAL=residual_ND is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=_num_warps(block * rows, per_thread=16),
        )
    return normed_ND, total_ND, inverse_rms_N


def _backward(
    ctx: Any, grad: Tensor, grad_total: Tensor | None = None, *, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the norm's input and weight; `grad_total` is added to the gradient of the input."""
    x_ND, weight_D, inverse_rms_N = ctx.saved_tensors
    num_rows, size = x_ND.shape
    block, rows = _tile(size)
    num_programs = min(_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(x_ND.device), -(-num_rows // rows))
    grad_x_ND = torch.empty_like(x_ND)
    parts_PD = torch.zeros(num_programs if with_weight else 0, size, dtype=torch.float32, device=x_ND.device)
    if x_ND.numel():
        _backward_kernel[(num_programs,)](
            grad.reshape(x_ND.shape).contiguous(),
            None if grad_total is None else grad_total.reshape(x_ND.shape).contiguous(),
            x_ND,
            weight_D.contiguous(),
            inverse_rms_N,
            grad_x_ND,
            parts_PD,
            num_rows,
            size,
            ZERO_CENTERED=ctx.zero_centered,
            HAS_TOTAL=grad_total is not None,
            WITH_WEIGHT=with_weight,
            ROWS=rows,
            BLOCK=block,
            num_warps=_num_warps(block * rows, per_thread=8),
        )
    grad_weight_D = parts_PD.sum(dim=0).to(weight_D.dtype) if with_weight else None
    return grad_x_ND.view(grad.shape), grad_weight_D


def _tile(size: int) -> tuple[int, int]:
    """Return the columns and rows of a program's tile, both powers of two."""
    block = 1 << (size - 1).bit_length()
    return block, max(1, _TILE // block)


def _num_warps(tile: int, *, per_thread: int) -> int:
    """Return the number of warps that gives each thread `per_thread` elements of the tile, at most 1,024 threads."""
    warp = threads_per_warp()
    return min(1024 // warp, max(4, tile // (warp * per_thread)))


@jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    inverse_rms_ptr,
    num_rows,
    size,
    eps,
    ZERO_CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < num_rows) & (column[None, :] < size)
    # 32-bit offsets would overflow for tensors of 2 ** 31 elements or more.
    offsets = row[:, None].to(tl.int64) * size + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)  # normalize the rounded sum, which backward reads
    inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / size + eps)
    tl.store(inverse_rms_ptr + row, inverse_rms, mask=row < num_rows)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    normed = x * inverse_rms[:, None] * weight[None, :]
    tl.store(normed_ptr + offsets, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    parts_ptr,
    num_rows,
    size,
    ZERO_CENTERED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    WITH_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    part = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(program * ROWS, num_rows, num_programs * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row[:, None] < num_rows) & (column[None, :] < size)
        offsets = row[:, None].to(tl.int64) * size + column[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        unit = x * inverse_rms
        if WITH_WEIGHT:
            part += tl.sum(grad * unit, axis=0)
        # Reload the weight for each tile: keeping it in registers would halve the occupancy.
        weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        # With y = x * r, r = (mean(x ** 2) + eps) ** -0.5: dx = r * (dy - y * mean(dy * y)).
        grad *= weight[None, :]
        grad_x = inverse_rms * (grad - unit * (tl.sum(grad * unit, axis=1) / size)[:, None])
        if HAS_TOTAL:
            grad_x += tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if WITH_WEIGHT:
        tl.store(parts_ptr + program.to(tl.int64) * size + column, part, mask=column < size)
