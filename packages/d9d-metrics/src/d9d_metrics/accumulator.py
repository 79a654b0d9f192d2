"""State of a metric: a tensor, and a reduction that combines values as well as the states of several ranks."""

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
    """Tensor that combines values by a reduction, starting from the reduction's identity.

    Counts are int64 and exact below 2**63. All other reductions are float64, so sums of float32 losses keep their
    precision. Convert counts before a division (`value.double()`), because the ratio of two int64 tensors is float32.
    All accumulators share one float64 collective, in which a count is sent as two halves.

    A concatenation holds single numbers, up to its length, and drops further numbers. Unused elements are NaN, so NaN
    itself cannot be stored. Only the state of a concatenation grows when ranks are combined.

    Attributes:
        reduction: Combination of values, and of the states of ranks: `"sum"`, `"count"` (a sum of integers), `"max"`,
            `"min"` or `"concat"`. NaN propagates through sums, maxima and minima.
        value: Current state; int64 for a count, otherwise float64. Read the attribute on every use: `Metric.to` and the
            first sync replace the tensor.
    """

    def __init__(self, reduction: Reduction, *, shape: Sequence[int] = ()) -> None:
        """Create an empty accumulator; by default a scalar on torch's default device. A concatenation has one dim."""
        assert reduction != "concat" or len(shape) == 1
        self.reduction: Reduction = reduction
        dtype = torch.int64 if reduction == "count" else torch.float64
        self.value = torch.full(tuple(shape), _IDENTITY[reduction], dtype=dtype)

    def update(self, value: Tensor | float) -> None:
        """Combine a value with the state. No host-device synchronization, no gradient.

        The value is a number, or a tensor of the accumulator's shape on its device, of any real dtype. A concatenation
        takes a one-dim tensor of any length and ignores its NaNs.

        Raises:
            UserError: If a tensor has another shape, which is not broadcast. Also if a count gets a tensor of floating
                dtype, or a number that is not an integer.
        """
        self._check_shape(value)
        if self.reduction == "sum":
            # Adds in float64, without a converted copy of the value.
            self.value.add_(value.detach() if isinstance(value, Tensor) and value.requires_grad else value)
            return
        is_tensor = isinstance(value, Tensor)
        if self.reduction == "count" and (value.is_floating_point() if is_tensor else not float(value).is_integer()):
            # NaN converted to int64 would be a large negative number.
            got = f"a tensor of {value.dtype}" if is_tensor else value
            raise UserError(f"a count got {got}; expected integers. Use a sum, or convert the tensor to int64.")
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
        """Set the state to the identity of the reduction."""
        self.value.fill_(_IDENTITY[self.reduction])

    def holding(self, value: Tensor) -> "Accumulator":
        """Return an accumulator of the same reduction whose state is `value` itself, not a copy."""
        other = Accumulator.__new__(Accumulator)
        other.reduction = self.reduction
        other.value = value
        return other

    def _check_shape(self, value: Tensor | float) -> None:
        """Raise `UserError` for a tensor that would be broadcast, or would broadcast the state."""
        got = value.shape if isinstance(value, Tensor) else self.value.shape
        if self.reduction == "concat":
            expected, is_right = "one dim", len(got) == 1
        else:
            expected, is_right = f"shape {tuple(self.value.shape)}", got == self.value.shape
        if not is_right:
            raise UserError(
                f"an accumulator ({self.reduction}) got a tensor of shape {tuple(got)}; expected {expected}. "
                "Reduce the tensor first, e.g. values.sum(), or create the accumulator with its shape."
            )

    def _append(self, operand: Tensor) -> None:
        """Write the values that are not NaN to the first unused elements, without a host-device synchronization."""
        length, num_used = self.value.numel(), (~self.value.isnan()).sum()
        is_new = ~operand.isnan()
        positions = torch.where(is_new, num_used + is_new.cumsum(0) - 1, length).clamp_(max=length)
        # An extra last element receives the values to drop.
        self.value.copy_(torch.cat([self.value, self.value.new_empty(1)]).scatter_(0, positions, operand)[:length])
