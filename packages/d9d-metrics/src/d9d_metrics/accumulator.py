"""The one kind of state a metric keeps: a tensor, and how copies of it on several ranks become one.

Metrics own accumulators instead of bare tensors so that all metrics of a job can be reduced together
(`d9d_metrics.sync`) without knowing what any of them measures.
"""

import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min", "concat"]

_IDENTITY: dict[Reduction, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf, "concat": math.nan}


@final
class Accumulator:
    """A float64 tensor that takes in values one by one and starts at the identity of its reduction.

    float64 holds every integer up to 2**53, so counts stay exact, and a sum of float32 losses loses nothing that
    matters. One dtype for all accumulators is also what lets them travel in one collective.

    A concatenation keeps single numbers, the first of them up to its length; places not taken are NaN, so NaN itself
    cannot be kept. It is the only reduction whose state grows when ranks are put together.

    Attributes:
        reduction: How values, and later ranks, are combined: `"sum"`, `"max"`, `"min"` or `"concat"`. NaN wins over
            everything in the first three.
        value: What was gathered so far; float64, of the shape given.
    """

    def __init__(self, reduction: Reduction, *, shape: Sequence[int] = (), device: torch.device | None = None) -> None:
        """Start empty.

        Args:
            reduction: How values are combined.
            shape: Shape of the tensor; a scalar by default. `(length,)` for a concatenation.
            device: Where the tensor lives; torch's default device if not given.
        """
        assert reduction != "concat" or len(shape) == 1
        self.reduction: Reduction = reduction
        self.value = torch.full(tuple(shape), _IDENTITY[reduction], dtype=torch.float64, device=device)

    def update(self, value: Tensor | float) -> None:
        """Take in a value: no synchronisation, no gradient.

        Args:
            value: A number, or a tensor of the accumulator's shape on its device, of any real dtype. For a
                concatenation a tensor of one dim and any length, of which NaN is left out, as is what finds no place.
        """
        operand = value.detach().double() if isinstance(value, Tensor) else torch.full_like(self.value, value)
        match self.reduction:
            case "sum":
                self.value.add_(operand)
            case "max":
                torch.maximum(self.value, operand, out=self.value)
            case "min":
                torch.minimum(self.value, operand, out=self.value)
            case "concat":
                self._append(operand)

    def reset(self) -> None:
        """Forget everything taken in."""
        self.value.fill_(_IDENTITY[self.reduction])

    def holding(self, value: Tensor) -> "Accumulator":
        """Make another accumulator of the same reduction that holds `value` (not a copy of it)."""
        other = Accumulator.__new__(Accumulator)
        other.reduction = self.reduction
        other.value = value
        return other

    def _append(self, operand: Tensor) -> None:
        """Write what is no NaN to the first free places, without asking the device how many are taken."""
        length, taken = self.value.numel(), (~self.value.isnan()).sum()
        is_new = ~operand.isnan()
        places = torch.where(is_new, taken + is_new.cumsum(0) - 1, length).clamp_(max=length)
        # The place behind the last one takes what is left out.
        self.value = torch.cat([self.value, self.value.new_empty(1)]).scatter_(0, places, operand)[:length]
