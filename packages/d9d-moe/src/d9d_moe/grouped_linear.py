"""Grouped matrix product: each group of rows is multiplied by its own matrix, as in a layer of experts.

`torch.nn.functional.grouped_mm` is one kernel for float32, bfloat16 and float16. Rows that are not aligned to 16 bytes
are padded for this kernel. Other dtypes use a loop over groups ("eager").

Shape legend: N rows, sorted by group; G groups; I input features; O output features.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from d9d_dist import defer_weight_grad
from d9d_dist.errors import UserError, check_choice
from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_dist.split_backward import WeightGradHandle
from d9d_moe.autocast import autocast_inputs

GroupedMatmulBackend: TypeAlias = Literal["grouped_mm", "eager"]

GROUPED_MATMUL_VARIABLE = "D9D_GROUPED_MATMUL"
"""Environment variable with the default backend of `grouped_matmul`."""

_ALIGNMENT = 16
"""Row alignment in bytes that `grouped_mm` requires."""


@final
class GroupedLinear(nn.Module):
    """Linear layer that has a weight per group: `y = x @ weight[group].T + bias[group]`, by default without bias.

    The weight [G, O, I] is a stack of `nn.Linear` weights, such as the expert weights in a checkpoint. The bias is
    [G, O].
    """

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, *, bias: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_groups, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`, and set the bias to 0."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_NI: Tensor, counts_G: Tensor) -> Tensor:
        """Call `grouped_matmul`, and add the bias of each row's group, except on `meta`, where products are counted."""
        y_NO = grouped_matmul(x_NI, self.weight, counts_G)
        return y_NO if self.bias is None or x_NI.is_meta else y_NO + bias_of_rows(self.bias, x_NI, counts_G)


def grouped_matmul(
    x_NI: Tensor, weight_GOI: Tensor, counts_G: Tensor, *, backend: GroupedMatmulBackend | None = None
) -> Tensor:
    """Multiply each group of rows by the transpose of its own matrix: products [N, O].

    The rows [N, I] are sorted by group. `counts_G` [G], integer, are the numbers of rows per group; the sum is N. The
    products have the dtype of the rows and matrices; `torch.autocast` casts both as in `torch.nn.Linear`. In a
    `SplitBackward` the weight gradient can be deferred. `choose_grouped_matmul` chooses the backend if it is None.

    Raises:
        UserError: If the backend is unknown, or the counts are not integers [G]; on the CPU also if their sum is not N.
    """
    _check_counts(counts_G, num_groups=len(weight_GOI), num_rows=len(x_NI))
    x_NI, weight_GOI = autocast_inputs(x_NI, weight_GOI)
    chosen = choose_grouped_matmul(x_NI) if backend is None else backend
    check_choice("backend", chosen, GroupedMatmulBackend)
    weight, slot = defer_weight_grad(weight_GOI, x_NI)
    return cast(Tensor, _GroupedMatmul.apply(x_NI, weight, counts_G, slot, chosen))


def _check_counts(counts_G: Tensor, *, num_groups: int, num_rows: int) -> None:
    """Raise a `UserError` for counts with which kernels would read other memory, or skip rows. No synchronization."""
    expected = f"expected integers of shape ({num_groups},)"
    if counts_G.shape != (num_groups,) or counts_G.is_floating_point():
        raise UserError(f"got counts_G of shape {tuple(counts_G.shape)} and dtype {counts_G.dtype}; {expected}.")
    has_values = counts_G.device.type == "cpu" and type(counts_G) is Tensor and not torch.compiler.is_compiling()
    if has_values and ((counts_G < 0).any() or counts_G.sum() != num_rows):
        raise UserError(f"got counts_G = {counts_G.tolist()}; {expected} with the sum {num_rows}, the number of rows.")


def bias_of_rows(bias_GO: Tensor, x_NI: Tensor, counts_G: Tensor) -> Tensor:
    """Return the bias of each row's group [N, O].

    A grouped product, because the gradient of indexing is summed in a nondeterministic order on accelerators.
    """
    return grouped_matmul(x_NI.new_ones(len(x_NI), 1), bias_GO.unsqueeze(-1), counts_G)


def choose_grouped_matmul(x_NI: Tensor) -> GroupedMatmulBackend:
    """Return the backend that `D9D_GROUPED_MATMUL` names, else "grouped_mm" if it supports the rows, else "eager".

    Without it, the choice depends only on the dtype, the number of rows, and whether they are on `meta`.

    Raises:
        UserError: If the variable names an unknown backend.
    """
    named = os.environ.get(GROUPED_MATMUL_VARIABLE, "")
    if named:
        check_choice(GROUPED_MATMUL_VARIABLE, named, GroupedMatmulBackend)
        return cast(GroupedMatmulBackend, named)
    # On meta only shapes are needed, and before torch 2.15 the meta function of grouped_mm took only bfloat16.
    is_supported = not x_NI.is_meta and x_NI.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return "grouped_mm" if is_supported and len(x_NI) > 0 else "eager"


class _GroupedMatmul(torch.autograd.Function):
    """Grouped product `y = x @ weight[group].T` whose backward can defer the weight gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes by position)
        ctx: Any,
        x_NI: Tensor,
        weight_GOI: Tensor,
        counts_G: Tensor,
        slot: WeightGradHandle,
        backend: GroupedMatmulBackend,
    ) -> Tensor:
        x_NI = x_NI.contiguous()
        ctx.save_for_backward(x_NI, weight_GOI, counts_G)
        ctx.slot, ctx.backend = slot, backend
        return _PRODUCTS[backend](x_NI, weight_GOI.transpose(1, 2), counts_G)

    @staticmethod
    @first_derivative_only("the grouped product of experts")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_NO = gradients[0].contiguous()  # kernels reject expanded tensors, such as the gradient of a sum
        x_NI, weight_GOI, counts_G = ctx.saved_tensors
        grad_x = _PRODUCTS[ctx.backend](grad_NO, weight_GOI, counts_G) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.slot.give(lambda: _OUTER_PRODUCTS[ctx.backend](grad_NO, x_NI, counts_G))
        return grad_x, grad_weight, None, None, None


def _missing(size: int, dtype: torch.dtype) -> int:
    """Return the number of padding elements that align a row of `size` elements."""
    return -size % (_ALIGNMENT // dtype.itemsize)


def _grouped_mm(x_NI: Tensor, weight_GIO: Tensor, counts_G: Tensor) -> Tensor:
    num_outputs = weight_GIO.shape[2]
    inner, outer = (_missing(size, x_NI.dtype) for size in weight_GIO.shape[1:])
    if inner or outer:  # pad with zeros, which do not change the product
        x_NI, weight_GIO = F.pad(x_NI, (0, inner)), F.pad(weight_GIO, (0, outer, 0, inner))
    y_NO = F.grouped_mm(x_NI, weight_GIO, offs=counts_G.cumsum(0, dtype=torch.int32))
    return y_NO[:, :num_outputs] if outer else y_NO


def _grouped_mm_outer(y_NO: Tensor, x_NI: Tensor, counts_G: Tensor) -> Tensor:
    num_outputs, num_inputs = y_NO.shape[1], x_NI.shape[1]
    outer, inner = (_missing(size, x_NI.dtype) for size in (num_outputs, num_inputs))
    y_NO, x_NI = F.pad(y_NO, (0, outer)) if outer else y_NO, F.pad(x_NI, (0, inner)) if inner else x_NI
    weight_GOI = F.grouped_mm(y_NO.T, x_NI, offs=counts_G.cumsum(0, dtype=torch.int32))
    return weight_GOI[:, :num_outputs, :num_inputs].contiguous()


def _counts_on_host(counts_G: Tensor, *, num_rows: int) -> list[int]:
    """Return the number of rows of each group, `num_rows` in all. A host-device synchronization.

    Fake tensors have no values, so a dry run of a job splits the rows evenly: sizes differ by at most 1.
    """
    if not isinstance(counts_G, FakeTensor):
        return counts_G.tolist()
    share, rest = divmod(num_rows, len(counts_G))
    return [share + (group < rest) for group in range(len(counts_G))]


def _eager(x_NI: Tensor, weight_GIO: Tensor, counts_G: Tensor) -> Tensor:
    """Multiply in a loop over groups; reading the counts is a host-device synchronization."""
    if x_NI.is_meta:
        return x_NI @ weight_GIO[0]  # as many FLOPs; the counts have no values on meta
    y_NO = x_NI.new_empty(len(x_NI), weight_GIO.shape[2])
    counts = _counts_on_host(counts_G, num_rows=len(x_NI))
    for y, x, weight_IO in zip(y_NO.split(counts), x_NI.split(counts), weight_GIO.unbind(), strict=True):
        torch.mm(x, weight_IO, out=y)
    return y_NO


def _eager_outer(y_NO: Tensor, x_NI: Tensor, counts_G: Tensor) -> Tensor:
    if x_NI.is_meta:
        return (y_NO.T @ x_NI).repeat(len(counts_G), 1, 1)
    weight_GOI = x_NI.new_empty(len(counts_G), y_NO.shape[1], x_NI.shape[1])
    counts = _counts_on_host(counts_G, num_rows=len(x_NI))
    for weight_OI, y, x in zip(weight_GOI.unbind(), y_NO.split(counts), x_NI.split(counts), strict=True):
        torch.mm(y.T, x, out=weight_OI)
    return weight_GOI


_PRODUCTS: Mapping[GroupedMatmulBackend, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grouped_mm": _grouped_mm,
    "eager": _eager,
}
"""Products of rows [N, I] and the matrices of their groups [G, I, O], by backend; the result is [N, O]."""

_OUTER_PRODUCTS: Mapping[GroupedMatmulBackend, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grouped_mm": _grouped_mm_outer,
    "eager": _eager_outer,
}
"""Per group, the product of the transposed rows [N, O] and the rows [N, I], by backend: weight gradients [G, O, I]."""
