"""Permute and unpermute: copies of tokens in a given order, and sums of the copies of each token.

On accelerators, the backward of torch's indexing sums gradients in a nondeterministic order. The functions here take a
permutation and its inverse, so each gradient is a gather and a sum in a fixed order. On an accelerator, forward and
backward are one Triton kernel each, without intermediate tensors.

Each token has A slots for copies. If the order has K < N rows, the remaining N - K slots are empty.

Shape legend: T tokens, A slots per token, N = T * A slots, K rows, one per slot that is not empty, D size of a row.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_modules.kernel_choice import has_kernel
from d9d_moe.autocast import no_autocast


def take_rows(x: Tensor, order_K: Tensor, inverse_N: Tensor, *, copies: int = 1) -> Tensor:
    """Gather copies of the rows of `x` [T, D]: row `i` of the result [K, D] is row `order[i] // copies` of `x`.

    `order_K` are the first K elements of a permutation of the N slots, int64. `inverse_N` is the inverse of the whole
    permutation, int64; K or more for an empty slot. Backward sums the gradients of the copies in a fixed order.
    """
    return cast(Tensor, _Move.apply(x, order_K, inverse_N, copies, False))


def sum_rows(rows_KD: Tensor, order_K: Tensor, inverse_N: Tensor, *, copies: int) -> Tensor:
    """Sum the copies of each token: row `t` of the result [T, D] is the sum over `a` of `rows[inverse[t * A + a]]`.

    The adjoint of `take_rows`. The sum is accumulated in at least float32 and has the dtype of the rows.
    """
    return cast(Tensor, _Move.apply(rows_KD, order_K, inverse_N, copies, True))


def combine_rows(rows_KD: Tensor, weights_TA: Tensor, order_K: Tensor, inverse_N: Tensor) -> Tensor:
    """Compute the sum over `a` of `weights[t, a] * rows[inverse[t * A + a]]` for each token `t` [T, D].

    `order_K` and `inverse_N` as in `take_rows`; weights of empty slots are unused. The sum is computed in the wider
    dtype of rows and weights and has the dtype of the rows.
    """
    return cast(Tensor, _Combine.apply(rows_KD, weights_TA, order_K, inverse_N))


def inverse_permutation(order_N: Tensor) -> Tensor:
    """Return the inverse of a permutation [N], int64, without a sort."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


class _Move(torch.autograd.Function):
    """Gather of rows, or sum of rows; each is the backward of the other."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes by position)
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int, is_sum: bool
    ) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies, ctx.is_sum = copies, is_sum
        return _sum(rows, inverse, copies) if is_sum else _take(rows, order, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        order, inverse = ctx.saved_tensors
        move = take_rows if ctx.is_sum else sum_rows
        return move(gradients[0], order, inverse, copies=ctx.copies), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        if has_kernel(rows):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return _triton_permute.gather_sum(rows, inverse, weights, copies=weights.shape[1])
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        return _host_sum(rows.to(dtype), inverse, weights.shape[1], weights.to(dtype)).to(rows.dtype)

    @staticmethod
    @first_derivative_only("the sum of the outputs of experts")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient_TD,) = gradients
        rows, weights, order = ctx.saved_tensors
        if has_kernel(gradient_TD):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return *_triton_permute.combine_backward(gradient_TD, rows, weights, order), None, None
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        gradient_KD = F.embedding(order // weights.shape[1], gradient_TD.to(dtype))
        with no_autocast(rows):
            grad_weights_K = torch.linalg.vecdot(gradient_KD, rows.to(dtype)).to(weights.dtype)
        grad_weights_N = weights.new_zeros(weights.numel()).index_copy_(0, order, grad_weights_K)
        gradient_KD.mul_(weights.flatten().index_select(0, order).unsqueeze(1).to(dtype))
        return gradient_KD.to(rows.dtype), grad_weights_N.view_as(weights), None, None


def _take(x: Tensor, order_K: Tensor, copies: int) -> Tensor:
    if has_kernel(x):
        from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

        return _triton_permute.gather(x, order_K, copies=copies)
    return F.embedding(order_K // copies if copies > 1 else order_K, x)  # half the time of `index_select` on a CPU


def _sum(rows_KD: Tensor, inverse_N: Tensor, copies: int) -> Tensor:
    if has_kernel(rows_KD):
        from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

        return _triton_permute.gather_sum(rows_KD, inverse_N, None, copies=copies)
    return _host_sum(rows_KD, inverse_N, copies)


def _host_sum(rows_KD: Tensor, inverse_N: Tensor, copies: int, weights_TA: Tensor | None = None) -> Tensor:
    """Return the sum of the rows of each token [T, D], in the order of its slots; empty slots count as zeros.

    One kernel, in a fifth of the time of a gather and a sum on a CPU.
    """
    if len(rows_KD) < len(inverse_N):
        rows_KD, inverse_N = F.pad(rows_KD, (0, 0, 0, 1)), inverse_N.clamp(max=len(rows_KD))
    slots_TA = inverse_N.view(len(inverse_N) // copies, copies)
    return F.embedding_bag(slots_TA, rows_KD, mode="sum", per_sample_weights=weights_TA)
