"""FLOPs of operators: by torch's formulas, and by our own for grouped products and convolutions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper


def flop_formula(packet: Any) -> Callable[..., Any] | None:
    """Return the function of an operator's arguments and `out_val` that counts its FLOPs; `None` if it has none."""
    return _FORMULAS.get(packet) or flop_registry.get(packet)


def grouped_flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product; each row, or column, of a 2-dim operand belongs to one group."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _convolution_gradients_flops(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any, out_val: Any) -> int:
    """Return the FLOPs of the gradients of a convolution; torch's formula does not divide them by the groups."""
    *_, is_transposed, _, _, needed = options
    positions = x if is_transposed else gradient
    return 2 * positions.numel() * weight[0].numel() * sum(needed[:2])


_FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm: shape_wrapper(grouped_flops),
    torch.ops.aten.convolution_backward: _convolution_gradients_flops,
}
