"""The metrics that are one number gathered over everything seen: sum, weighted mean, largest and smallest value."""

from typing import final

import torch
from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric


@final
class Sum(Metric):
    """The sum of all values; 0 of none, NaN if any value was NaN."""

    def __init__(self) -> None:
        self._total = Accumulator("sum")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the sum so far."""
        return {"total": self._total}

    def update(self, values: Tensor | float) -> None:
        """Add a number, or all elements of a tensor of any shape."""
        self._total.update(values.detach().sum(dtype=torch.float64) if isinstance(values, Tensor) else values)

    def compute(self) -> Tensor:
        """Return the sum: a float64 scalar."""
        return self._total.value.clone()


@final
class WeightedMean(Metric):
    """The mean of values that come as sums with their weights, e.g. a loss summed over tokens and the number of tokens.

    It is the sum of all totals divided by the sum of all weights, so it does not depend on how the data was split.
    Where the weight is 0 it is the total undivided: 0 if nothing was seen. It is NaN if a total or a weight was NaN.
    """

    def __init__(self) -> None:
        self._total = Accumulator("sum")
        self._weight = Accumulator("sum")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the sum of totals and the sum of weights."""
        return {"total": self._total, "weight": self._weight}

    def update(self, total: Tensor | float, weight: Tensor | float) -> None:
        """Take in a sum of values.

        Args:
            total: The sum of weighted values; a number or a scalar tensor.
            weight: The sum of their weights; a number or a scalar tensor.
        """
        self._total.update(total)
        self._weight.update(weight)

    def compute(self) -> Tensor:
        """Return total / weight: a float64 scalar."""
        weight = self._weight.value
        return self._total.value / torch.where(weight == 0, 1.0, weight)


@final
class Max(Metric):
    """The largest value; minus infinity of none, NaN if any value was NaN."""

    def __init__(self) -> None:
        self._largest = Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the largest value so far."""
        return {"largest": self._largest}

    def update(self, values: Tensor | float) -> None:
        """Take in a number, or all elements of a tensor of any shape; an empty tensor changes nothing."""
        if not isinstance(values, Tensor):
            self._largest.update(values)
        elif values.numel() > 0:
            self._largest.update(values.detach().amax())

    def compute(self) -> Tensor:
        """Return the largest value: a float64 scalar."""
        return self._largest.value.clone()


@final
class Min(Metric):
    """The smallest value; plus infinity of none, NaN if any value was NaN."""

    def __init__(self) -> None:
        self._smallest = Accumulator("min")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the smallest value so far."""
        return {"smallest": self._smallest}

    def update(self, values: Tensor | float) -> None:
        """Take in a number, or all elements of a tensor of any shape; an empty tensor changes nothing."""
        if not isinstance(values, Tensor):
            self._smallest.update(values)
        elif values.numel() > 0:
            self._smallest.update(values.detach().amin())

    def compute(self) -> Tensor:
        """Return the smallest value: a float64 scalar."""
        return self._smallest.value.clone()
