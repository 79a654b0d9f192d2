"""Rows to an order and back: copies of tokens sorted by expert, and the weighted sum of what experts made of them.

Torch's own indexing adds gradients up in an unordered way on accelerators. Here every permutation comes with its
inverse, so each gradient is a gather and a sum in a fixed order. On an accelerator each direction is one Triton kernel
that reads every row once and writes it once; what follows is the torch path, and what the kernels are tested against.

Shape legend: T tokens, A copies of each token, N = T * A rows, D size of a row.
"""

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def take_rows(x: Tensor, order_N: Tensor, inverse_N: Tensor, *, copies: int = 1) -> Tensor:
    """Row `i` of the result is row `order[i] // copies` of `x`; backward adds copies up in a fixed order.

    Args:
        x: Rows [N / copies, D].
        order_N: A permutation [N], int64.
        inverse_N: Its inverse [N], int64.
        copies: How often each row is taken.

    Returns:
        Rows [N, D].
    """
    return cast(Tensor, _Take.apply(x, order_N, inverse_N, copies))


def combine_rows(rows_ND: Tensor, weights_TA: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Row `t` of the result is the sum over `a` of `weights[t, a] * rows[inverse[t * A + a]]`.

    Args:
        rows_ND: Rows [N, D], in the order in which `take_rows` gave them.
        weights_TA: What each copy of a row counts [T, A].
        order_N: The permutation that `take_rows` took [N], int64.
        inverse_N: Its inverse [N], int64.

    Returns:
        Rows [T, D] in the dtype of `rows_ND`; added up in the wider of its dtype and that of the weights.
    """
    return cast(Tensor, _Combine.apply(rows_ND, weights_TA, order_N, inverse_N))


def inverse_permutation(order_N: Tensor) -> Tensor:
    """The permutation that undoes another [N], int64; without sorting."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        if _has_kernel(x):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return _triton_permute.gather(x, order, copies=copies)
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (inverse,) = ctx.saved_tensors
        if _has_kernel(gradient):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return _triton_permute.gather_sum(gradient, inverse, None, copies=ctx.copies), None, None, None
        by_copy = gradient.index_select(0, inverse)
        if ctx.copies > 1:
            by_copy = by_copy.view(len(inverse) // ctx.copies, ctx.copies, by_copy.shape[-1]).sum(dim=1)
        return by_copy, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        if _has_kernel(rows):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return _triton_permute.gather_sum(rows, inverse, weights, copies=weights.shape[1])
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        by_token_TAD = rows.index_select(0, inverse).view(*weights.shape, rows.shape[-1]).to(dtype)
        return torch.bmm(weights.unsqueeze(1).to(dtype), by_token_TAD).squeeze(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient_TD,) = gradients
        rows, weights, order, inverse = ctx.saved_tensors
        if _has_kernel(gradient_TD):
            from d9d_moe import _triton_permute  # noqa: PLC0415  (Triton is optional)

            return *_triton_permute.combine_backward(gradient_TD, rows, weights, order), None, None
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        wide_TD = gradient_TD.to(dtype)
        by_token_TAD = rows.index_select(0, inverse).view(*weights.shape, rows.shape[-1]).to(dtype)
        grad_weights_TA = torch.bmm(by_token_TAD, wide_TD.unsqueeze(2)).squeeze(2).to(weights.dtype)
        grad_ND = wide_TD.index_select(0, order // weights.shape[1])
        grad_ND.mul_(weights.flatten().index_select(0, order).unsqueeze(1).to(dtype))
        return grad_ND.to(rows.dtype), grad_weights_TA, None, None


def _has_kernel(x: Tensor) -> bool:
    """Whether a Triton kernel can compute on a tensor: 32 bits or fewer, on an accelerator, with Triton installed."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type not in ("cpu", "meta")
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )
