"""How fast a job is, and what its steps wait for."""

from typing import final

from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric
from d9d_metrics.step_clock import StepSeconds


@final
class Throughput(Metric):
    """Items of all ranks per second: the sum of what they did over the longest time that any of them took."""

    def __init__(self) -> None:
        self._items, self._seconds = Accumulator("sum"), Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the number of items and the seconds of this rank."""
        return {"items": self._items, "seconds": self._seconds}

    def update(self, items: Tensor | float, seconds: float) -> None:
        """Take in some work.

        Args:
            items: How many items this rank did, e.g. tokens; a number or a scalar tensor.
            seconds: The time it took.
        """
        self._items.update(items)
        # The maximum is that over ranks; on one rank times add up.
        self._seconds.update(self._seconds.value.clamp(min=0) + seconds)

    def compute(self) -> Tensor:
        """Return the items per second: a float64 scalar; 0 of nothing."""
        seconds = self._seconds.value.clamp(min=0)
        return self._items.value / seconds.where(seconds != 0, 1.0)


@final
class StepTime(Metric):
    """The mean time of a step, split into waiting for data, communication, and all the rest, which is computing.

    The value has `seconds`, `data_wait`, `communication` and `compute`, which are means over steps and ranks, the last
    three adding up to the first; and `slowest`, the longest step of any rank. In seconds; all 0 of no step.
    """

    def __init__(self) -> None:
        self._sums = {name: Accumulator("sum") for name in ("steps", "seconds", "data_wait", "communication")}
        self._slowest = Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the number of steps, the sums of their times and the longest one."""
        return {**self._sums, "slowest": self._slowest}

    def update(self, step: StepSeconds) -> None:
        """Take in a step, e.g. of a `StepClock`."""
        times = {"steps": 1.0, "seconds": step.total, "data_wait": step.data_wait, "communication": step.communication}
        for name, seconds in times.items():
            self._sums[name].update(seconds)
        self._slowest.update(step.total)

    def compute(self) -> dict[str, Tensor]:
        """Return the times by name: float64 scalars."""
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
