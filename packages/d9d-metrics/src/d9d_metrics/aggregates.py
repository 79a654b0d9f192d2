"""Metrics that aggregate all values into one number: sum, weighted mean, maximum and minimum."""

from typing import Literal, final

import torch
from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric


@final
class Sum(Metric):
    """Sum of all values; 0 if there are none, NaN if any value was NaN."""

    def __init__(self) -> None:
        self._total = Accumulator("sum")

    def update(self, values: Tensor | float) -> None:
        """Add a number, or all elements of a tensor of any shape."""
        self._total.update(values.detach().sum(dtype=torch.float64) if isinstance(values, Tensor) else values)

    def compute(self) -> Tensor:
        """Return the sum: a float64 scalar."""
        return self._total.value.clone()


@final
class WeightedMean(Metric):
    """Weighted mean of values that are added as partial sums with their weights, such as a loss and a token count.

    The mean is the sum of totals over the sum of weights, so it does not depend on how the data is split over ranks and
    steps. If the sum of weights is 0, the value is the sum of totals: 0 without data. The value is NaN if a total or
    weight was NaN.
    """

    def __init__(self) -> None:
        self._total = Accumulator("sum")
        self._weight = Accumulator("sum")

    def update(self, total: Tensor | float, weight: Tensor | float) -> None:
        """Add a sum of weighted values and the sum of their weights; numbers or scalar tensors."""
        self._total.update(total)
        self._weight.update(weight)

    def compute(self) -> Tensor:
        """Return total / weight: a float64 scalar."""
        weight = self._weight.value
        return self._total.value / torch.where(weight == 0, 1.0, weight)


class _Extreme(Metric):
    """Largest or smallest value; NaN if any value was NaN."""

    def __init__(self, kind: Literal["max", "min"], key: str) -> None:
        self._kind, self._key, self._extreme = kind, key, Accumulator(kind)

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the accumulator of the value."""
        return {self._key: self._extreme}

    def update(self, values: Tensor | float) -> None:
        """Include a number, or all elements of a tensor of any shape; an empty tensor changes nothing."""
        if not isinstance(values, Tensor):
            self._extreme.update(values)
        elif values.numel() > 0:
            self._extreme.update(values.detach().amax() if self._kind == "max" else values.detach().amin())

    def compute(self) -> Tensor:
        """Return the value: a float64 scalar."""
        return self._extreme.value.clone()


@final
class Max(_Extreme):
    """Maximum of all values; minus infinity if there are none, NaN if any value was NaN."""

    def __init__(self) -> None:
        super().__init__("max", "largest")


@final
class Min(_Extreme):
    """Minimum of all values; plus infinity if there are none, NaN if any value was NaN."""

    def __init__(self) -> None:
        super().__init__("min", "smallest")
