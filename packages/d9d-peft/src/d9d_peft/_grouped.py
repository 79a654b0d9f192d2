"""Optional support of `d9d_moe.GroupedLinear`. Jobs that do not use `d9d_moe` never import it."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Product = Callable[..., Tensor]
"""Function (rows, weight, further arguments of the layer) that computes the product of a layer."""


def grouped_product(layer: nn.Module) -> Product | None:
    """Return `d9d_moe.grouped_matmul` for a `d9d_moe.GroupedLinear`, else `None`. Does not import `d9d_moe` itself."""
    module: Any = sys.modules.get("d9d_moe")
    return module.grouped_matmul if module is not None and isinstance(layer, module.GroupedLinear) else None
