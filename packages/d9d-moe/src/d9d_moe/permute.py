"""Rows to an order and back: copies of tokens sorted by expert or rank, and the sums of what comes back of them.

Torch's own indexing adds gradients up in an unordered way on accelerators. Here every permutation comes with its
inverse, so each gradient is a gather and a sum in a fixed order. On an accelerator each direction is one Triton kernel
that reads every row once and writes it once; what follows is the torch path, and what the kernels are tested against.

A token has as many places for copies as any may have; an order of fewer rows than places leaves the others empty.

Shape legend: T tokens, A places for copies of each token, N = T * A places, K rows, one for each place that is not
empty (N where none is), D size of a row.
"""

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from d9d_moe.autocast import no_autocast


def take_rows(x: Tensor, order_K: Tensor, inverse_N: Tensor, *, copies: int = 1) -> Tensor:
    """Row `i` of the result is row `order[i] // copies` of `x`; backward adds copies up in a fixed order.

    Args:
        x: Rows [T, D].
        order_K: The first K of a permutation of the places [K], int64.
        inverse_N: The inverse of all of it [N], int64: for an empty place, K or more.
        copies: A.

    Returns:
        Rows [K, D].
    """
    return cast(Tensor, _Take.apply(x, order_K, inverse_N, copies))


def sum_rows(rows_KD: Tensor, order_K: Tensor, inverse_N: Tensor, *, copies: int) -> Tensor:
    """Row `t` of the result is the sum over `a` of `rows[inverse[t * A + a]]`: the adjoint of `take_rows`.

    Args:
        rows_KD: Rows [K, D], in the order in which `take_rows` gave them.
        order_K: What `take_rows` took [K], int64.
        inverse_N: Its inverse [N], int64.
        copies: A.

    Returns:
        Rows [T, D] in the dtype of `rows_KD`; added up in float32 where that is wider.
    """
    return cast(Tensor, _Sum.apply(rows_KD, order_K, inverse_N, copies))


def combine_rows(rows_KD: Tensor, weights_TA: Tensor, order_K: Tensor, inverse_N: Tensor) -> Tensor:
    """Row `t` of the result is the sum over `a` of `weights[t, a] * rows[inverse[t * A + a]]`.

    Args:
        rows_KD: Rows [K, D], in the order in which `take_rows` gave them.
        weights_TA: What each copy of a row counts [T, A]; what stands at an empty place counts nothing.
        order_K: What `take_rows` took [K], int64.
        inverse_N: Its inverse [N], int64.

    Returns:
        Rows [T, D] in the dtype of `rows_KD`; added up in the wider of its dtype and that of the weights.
    """
    return cast(Tensor, _Combine.apply(rows_KD, weights_TA, order_K, inverse_N))


def inverse_permutation(order_N: Tensor) -> Tensor:
    """The permutation that undoes another [N], int64; without sorting."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return _take(x, order, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return sum_rows(gradients[0], order, inverse, copies=ctx.copies), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return _sum(rows, inverse, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return take_rows(gradients[0], order, inverse, copies=ctx.copies), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        if _has_kernel(rows):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return _triton_permute.gather_sum(rows, inverse, weights, copies=weights.shape[1])
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        by_token_TAD = _in_places(rows, inverse, weights.shape[1]).to(dtype)
        with no_autocast(rows):
            return torch.bmm(weights.unsqueeze(1).to(dtype), by_token_TAD).squeeze(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient_TD,) = gradients
        rows, weights, order = ctx.saved_tensors
        if _has_kernel(gradient_TD):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return *_triton_permute.combine_backward(gradient_TD, rows, weights, order), None, None
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        gradient_KD = gradient_TD.to(dtype).index_select(0, order // weights.shape[1])
        with no_autocast(rows):
            grad_weights_K = torch.linalg.vecdot(gradient_KD, rows.to(dtype)).to(weights.dtype)
        grad_weights_N = weights.new_zeros(weights.numel()).index_copy_(0, order, grad_weights_K)
        gradient_KD.mul_(weights.flatten().index_select(0, order).unsqueeze(1).to(dtype))
        return gradient_KD.to(rows.dtype), grad_weights_N.view_as(weights), None, None


def _take(x: Tensor, order_K: Tensor, copies: int) -> Tensor:
    if _has_kernel(x):
        from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

        return _triton_permute.gather(x, order_K, copies=copies)
    return x.index_select(0, order_K // copies if copies > 1 else order_K)


def _sum(rows_KD: Tensor, inverse_N: Tensor, copies: int) -> Tensor:
    if _has_kernel(rows_KD):
        from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

        return _triton_permute.gather_sum(rows_KD, inverse_N, None, copies=copies)
    by_token_TAD = _in_places(rows_KD, inverse_N, copies)
    return by_token_TAD.sum(dim=1) if copies > 1 else by_token_TAD.squeeze(1)


def _in_places(rows_KD: Tensor, inverse_N: Tensor, copies: int) -> Tensor:
    """The rows of each token [T, A, D], zeros where a place is empty."""
    if len(rows_KD) < len(inverse_N):
        rows_KD, inverse_N = F.pad(rows_KD, (0, 0, 0, 1)), inverse_N.clamp(max=len(rows_KD))
    return rows_KD.index_select(0, inverse_N).view(len(inverse_N) // copies, copies, rows_KD.shape[-1])


def _has_kernel(x: Tensor) -> bool:
    """Whether a Triton kernel can compute on a tensor: 32 bits or fewer, on an accelerator, with Triton installed."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type not in ("cpu", "meta")
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )
