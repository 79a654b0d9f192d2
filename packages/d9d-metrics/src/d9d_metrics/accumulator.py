"""The one kind of state a metric keeps: a tensor, and how copies of it on several ranks become one.

Metrics own accumulators instead of bare tensors so that all metrics of a job can be reduced together
(`d9d_metrics.sync`) without knowing what any of them measures.
"""

import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]

_IDENTITY: dict[Reduction, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@final
class Accumulator:
    """A float64 tensor that takes in values one by one and starts at the identity of its reduction.

    float64 holds every integer up to 2**53, so counts stay exact, and a sum of float32 losses loses nothing that
    matters. One dtype for all accumulators is also what lets them travel in one collective.

    Attributes:
        reduction: How values, and later ranks, are combined: `"sum"`, `"max"` or `"min"`. NaN wins over everything.
        value: What was gathered so far; float64, of the shape given.
    """

    def __init__(self, reduction: Reduction, *, shape: Sequence[int] = (), device: torch.device | None = None) -> None:
        """Start empty.

        Args:
            reduction: How values are combined.
            shape: Shape of the tensor; a scalar by default.
            device: Where the tensor lives; torch's default device if not given.
        """
        self.reduction: Reduction = reduction
        self.value = torch.full(tuple(shape), _IDENTITY[reduction], dtype=torch.float64, device=device)

    def update(self, value: Tensor | float) -> None:
        """Take in a value: no synchronisation, no gradient.

        Args:
            value: A number, or a tensor of the accumulator's shape on its device, of any real dtype.
        """
        operand = value.detach().double() if isinstance(value, Tensor) else torch.full_like(self.value, value)
        match self.reduction:
            case "sum":
                self.value.add_(operand)
            case "max":
                torch.maximum(self.value, operand, out=self.value)
            case "min":
                torch.minimum(self.value, operand, out=self.value)

    def reset(self) -> None:
        """Forget everything taken in."""
        self.value.fill_(_IDENTITY[self.reduction])

    def holding(self, value: Tensor) -> "Accumulator":
        """Make another accumulator of the same reduction that holds `value` (not a copy of it)."""
        other = Accumulator.__new__(Accumulator)
        other.reduction = self.reduction
        other.value = value
        return other
