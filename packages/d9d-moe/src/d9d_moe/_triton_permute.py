"""Triton kernels of `permute`: gathers and weighted sums of rows, each in one kernel without intermediate tensors.

Arithmetic is in float32; 16-bit dtypes are only loaded and stored. Each program processes one row of `order`, or one
output row of a sum.
"""

# Kernel arguments are pointers and scalars without Python types, passed by position.
# ruff: noqa: ANN001, ANN202, PLR0917

import torch
import triton.language as tl
from torch import Tensor

from d9d_modules.triton_jit import jit

_BLOCK = 2048
"""Largest number of features that a program processes at once."""


def gather(x: Tensor, order_K: Tensor, *, copies: int) -> Tensor:
    """Return contiguous rows [K, D]: row `i` is row `order[i] // copies` of `x`."""
    x = x.contiguous()
    out = x.new_empty(len(order_K), x.shape[1])
    if out.numel():
        _gather_kernel[len(order_K),](x, order_K, out, x.shape[1], copies, BLOCK=_block(x.shape[1]))
    return out


def gather_sum(rows: Tensor, inverse_N: Tensor, weights_TA: Tensor | None, *, copies: int) -> Tensor:
    """Return rows [T, D]: row `t` is the sum over `a < copies` of `weights[t, a] * rows[inverse[t * copies + a]]`.

    Without `weights_TA` all weights are 1. Indices of `len(rows)` or more are skipped.
    """
    rows = rows.contiguous()
    out = rows.new_empty(len(inverse_N) // copies, rows.shape[1])
    if out.numel():
        _gather_sum_kernel[len(out),](
            rows,
            inverse_N,
            rows if weights_TA is None else weights_TA.contiguous(),
            out,
            len(rows),
            rows.shape[1],
            copies,
            HAS_WEIGHTS=weights_TA is not None,
            BLOCK=_block(rows.shape[1]),
        )
    return out


def combine_backward(
    gradient_TD: Tensor, rows_KD: Tensor, weights_TA: Tensor, order_K: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows [K, D] and of the weights [T, A] of a weighted sum, in one pass."""
    gradient_TD, rows_KD, weights_TA = gradient_TD.contiguous(), rows_KD.contiguous(), weights_TA.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows_KD), torch.zeros_like(weights_TA)
    if rows_KD.numel():
        _combine_backward_kernel[len(rows_KD),](
            gradient_TD,
            rows_KD,
            weights_TA,
            order_K,
            grad_rows,
            grad_weights,
            rows_KD.shape[1],
            weights_TA.shape[1],
            BLOCK=_block(rows_KD.shape[1]),
        )
    return grad_rows, grad_weights


def _block(size: int) -> int:
    return min(_BLOCK, 1 << max(size - 1, 0).bit_length())


@jit
def _gather_kernel(x_ptr, order_ptr, out_ptr, size, copies, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(order_ptr + row) // copies
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        tl.store(out_ptr + row * size + offsets, tl.load(x_ptr + source * size + offsets, mask=mask), mask=mask)


@jit
def _gather_sum_kernel(
    rows_ptr, inverse_ptr, weights_ptr, out_ptr, num_rows, size, copies, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
        for copy in range(copies):
            source = tl.load(inverse_ptr + token * copies + copy)
            has_row = offsets < tl.where(source < num_rows, size, 0)
            row = tl.load(rows_ptr + source * size + offsets, mask=has_row, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                row = row * tl.load(weights_ptr + token * copies + copy).to(tl.float32)
            total += row
        tl.store(out_ptr + token * size + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _combine_backward_kernel(
    grad_ptr, rows_ptr, weights_ptr, order_ptr, grad_rows_ptr, grad_weights_ptr, size, copies, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)  # index of the copy in the flattened [T, A]
    token = slot // copies
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    dot = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        grad = tl.load(grad_ptr + token * size + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(rows_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
        dot += grad * value
        scaled = (grad * weight).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + row * size + offsets, scaled, mask=mask)
    tl.store(grad_weights_ptr + slot, tl.sum(dot).to(grad_weights_ptr.dtype.element_ty))
