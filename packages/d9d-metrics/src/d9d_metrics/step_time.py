"""Throughput of a job, and the breakdown of its step time."""

from typing import final

from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric
from d9d_metrics.step_clock import StepSeconds


@final
class Throughput(Metric):
    """Items per second of all ranks: the items of all ranks over the longest time of any rank."""

    def __init__(self) -> None:
        self._items, self._seconds = Accumulator("sum"), Accumulator("max")

    def update(self, items: Tensor | float, seconds: float) -> None:
        """Add the number of items, e.g. tokens, that this rank processed in `seconds`: a number or a scalar tensor."""
        self._items.update(items)
        # Times are summed on each rank; the metric takes their maximum over ranks.
        self._seconds.update(self._seconds.value.clamp(min=0) + seconds)

    def compute(self) -> Tensor:
        """Return the items per second: a float64 scalar; 0 without data."""
        seconds = self._seconds.value.clamp(min=0)
        return self._items.value / seconds.where(seconds != 0, 1.0)


@final
class StepTime(Metric):
    """Mean step time, split into waiting for data, communication and computation.

    The value has the means over steps and ranks of `data_wait`, `communication` and `compute`, and their sum `seconds`.
    `slowest` is the longest step of any rank. All values are in seconds, and 0 without a step.
    """

    def __init__(self) -> None:
        self._sums = {name: Accumulator("sum") for name in ("steps", "seconds", "data_wait", "communication")}
        self._slowest = Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the accumulators of the number of steps, the sums of their times and the longest step."""
        return {**self._sums, "slowest": self._slowest}

    def update(self, step: StepSeconds) -> None:
        """Add a step, e.g. from a `StepClock`."""
        times = {"steps": 1.0, "seconds": step.total, "data_wait": step.data_wait, "communication": step.communication}
        for name, seconds in times.items():
            self._sums[name].update(seconds)
        self._slowest.update(step.total)

    def compute(self) -> dict[str, Tensor]:
        """Return the times by name, in seconds: float64 scalars."""
        steps = self._sums["steps"].value.clamp(min=1)
        names = ("seconds", "data_wait", "communication")
        total, data_wait, communication = (self._sums[name].value / steps for name in names)
        return {
            "seconds": total,
            "data_wait": data_wait,
            "communication": communication,
            "compute": total - data_wait - communication,
            "slowest": self._slowest.value.clamp(min=0),
        }
