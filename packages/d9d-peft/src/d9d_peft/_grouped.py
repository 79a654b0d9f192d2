"""Layers of experts, which are those of `d9d-moe`: known where a job uses them, and not asked for where none does."""

import sys
from collections.abc import Callable

from torch import Tensor, nn

Product = Callable[..., Tensor]
"""Multiplies rows with a weight, as the layer does that the weight is of: (rows, weight, further arguments)."""


def grouped_product(layer: nn.Module) -> Product | None:
    """How a `d9d_moe.GroupedLinear` multiplies; `None` for any other module.

    A model that has such a layer has imported it, so that nothing is imported for a model that has none.
    """
    if "d9d_moe" not in sys.modules:
        return None
    from d9d_moe import GroupedLinear, grouped_matmul  # noqa: PLC0415  (the extra `moe`)

    return grouped_matmul if isinstance(layer, GroupedLinear) else None
