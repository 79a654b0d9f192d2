"""The one kind of state a metric keeps: a tensor, and how copies of it on several ranks become one.

Metrics own accumulators instead of bare tensors so that all metrics of a job can be reduced together
(`d9d_metrics.sync`) without knowing what any of them measures.
"""

import math
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from d9d_dist import UserError

Reduction = Literal["sum", "count", "max", "min", "concat"]

_IDENTITY: dict[Reduction, float] = {"sum": 0.0, "count": 0, "max": -math.inf, "min": math.inf, "concat": math.nan}


@final
class Accumulator:
    """A tensor that takes in values one by one and starts at the identity of its reduction.

    It is of float64, in which a sum of float32 losses loses nothing that matters; a count is of int64, in which every
    whole number below 2**63 is exact (and two of which have a float32 ratio: divide `value.double()`). All of them
    travel in one collective of float64, counts in two halves.

    A concatenation keeps single numbers, the first of them up to its length; places not taken are NaN, so NaN itself
    cannot be kept. It is the only reduction whose state grows when ranks are put together.

    Attributes:
        reduction: How values, and later ranks, are combined: `"sum"`, `"max"` and `"min"`, in which NaN wins over
            everything; `"count"`, a sum of whole numbers; or `"concat"`.
        value: What was gathered so far; float64, or int64 of a count, of the shape given. Ask for it whenever it is
            needed: `Metric.to` and the first sync put another tensor in its place.
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
        dtype = torch.int64 if reduction == "count" else torch.float64
        self.value = torch.full(tuple(shape), _IDENTITY[reduction], dtype=dtype, device=device)

    def update(self, value: Tensor | float) -> None:
        """Take in a value: no synchronisation, no gradient.

        Args:
            value: A number, or a tensor of the accumulator's shape on its device, of any real dtype; of whole numbers
                for a count. For a concatenation a tensor of one dim and any length, of which NaN is left out, as is
                what finds no place.

        Raises:
            UserError: If a count is given a tensor of floating dtype or a number that is not whole.
        """
        if self.reduction == "sum":
            self.value.add_(value.detach() if isinstance(value, Tensor) else value)  # in float64, without a copy in it
            return
        is_tensor = isinstance(value, Tensor)
        if self.reduction == "count" and not _is_whole(value):
            # A conversion to int64 would make a huge negative number of NaN.
            got = f"a tensor of {value.dtype}" if is_tensor else value
            raise UserError(f"a count got {got}; expected whole numbers. Use a sum, or convert the tensor to int64.")
        operand = value.detach().to(self.value.dtype) if is_tensor else torch.full_like(self.value, value)
        match self.reduction:
            case "count":
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
        self.value.copy_(torch.cat([self.value, self.value.new_empty(1)]).scatter_(0, places, operand)[:length])


def _is_whole(value: Tensor | float) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else float(value).is_integer()
