"""One matrix product for each group of rows: what a layer of experts is made of.

`torch.nn.functional.grouped_mm` does it in one kernel. It takes float32, bfloat16 and float16 whose rows are aligned to
16 bytes; everything else goes through a loop, which is also the reference that the kernel is tested against.

Shape legend: N rows, sorted by group; G groups; I input features; O output features.
"""

from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GroupedMatmulBackend: TypeAlias = Literal["grouped_mm", "eager"]

_ALIGNMENT = 16
"""Bytes that the length of a row must be a multiple of in `grouped_mm`."""


@final
class GroupedLinear(nn.Module):
    """A linear layer for each group, without bias: `y = x @ weight[group].T`.

    Args:
        num_groups: Number of groups.
        in_features: Size of the last dim of the input.
        out_features: Size of the last dim of the output.
        init_std: Standard deviation of the initial weight [G, O, I]; the layout of `nn.Linear` for each group, so that
            checkpoints with one matrix for each expert stack into it.
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x_NI: Tensor, counts_G: Tensor) -> Tensor:
        """See `grouped_matmul`, which this calls with the weight of this module."""
        return grouped_matmul(x_NI, self.weight, counts_G)


def grouped_matmul(
    x_NI: Tensor, weight_GOI: Tensor, counts_G: Tensor, *, backend: GroupedMatmulBackend | None = None
) -> Tensor:
    """Multiply each group of rows with its own matrix.

    Args:
        x_NI: Rows [N, I], those of the first group first.
        weight_GOI: A matrix for each group [G, O, I], in the dtype of the rows.
        counts_G: Number of rows of each group [G], integer, 0 included; they add up to N.
        backend: How to compute it; None for what `choose_backend` says.

    Returns:
        The products [N, O] in the dtype of the rows.
    """
    match backend or choose_backend(x_NI, weight_GOI):
        case "grouped_mm":
            return _grouped_mm(x_NI, weight_GOI, counts_G)
        case "eager":
            return _eager(x_NI, weight_GOI, counts_G)


def choose_backend(x_NI: Tensor, weight_GOI: Tensor) -> GroupedMatmulBackend:
    """The fast kernel where it can serve, else the loop.

    The decision is made from dtypes and shapes alone, so no device has to be waited for.
    """
    _, num_outputs, num_inputs = weight_GOI.shape
    # The kernel's meta function took only bfloat16 before torch 2.15; shapes need no kernel.
    served = not x_NI.is_meta and x_NI.dtype in (torch.float32, torch.bfloat16, torch.float16)
    # Rows of inputs, outputs and of their gradients.
    aligned = all(size * x_NI.element_size() % _ALIGNMENT == 0 for size in (num_inputs, num_outputs))
    return "grouped_mm" if served and aligned and len(x_NI) > 0 else "eager"


def _grouped_mm(x_NI: Tensor, weight_GOI: Tensor, counts_G: Tensor) -> Tensor:
    ends_G = counts_G.cumsum(0, dtype=torch.int32)
    y_NO = F.grouped_mm(x_NI.contiguous(), weight_GOI.transpose(-2, -1), offs=ends_G)
    if y_NO.requires_grad:
        # The kernel refuses the strides of an expanded gradient, such as that of a sum.
        y_NO.register_hook(Tensor.contiguous)
    return y_NO


def _eager(x_NI: Tensor, weight_GOI: Tensor, counts_G: Tensor) -> Tensor:
    """Reads the counts on the host, so it waits for the device."""
    if x_NI.is_meta:
        return F.linear(x_NI, weight_GOI[0])  # there are no counts to read, and every group gives the same shape
    groups = zip(x_NI.split(counts_G.tolist()), weight_GOI.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in groups])
