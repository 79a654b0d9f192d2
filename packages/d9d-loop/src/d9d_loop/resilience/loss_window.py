"""The losses that a loss is compared with, and from which one on it is a spike.

A loss is a spike if it exceeds

    median + deviations * max(1.4826 * MAD, 0.01 * |median|)

of a window of losses that ends two steps before it, where MAD is the median distance from the median (Leys et al.:
"Detecting outliers", 2013); 1.4826 MAD is the standard deviation of normal numbers, and the other term keeps a plateau
from having no deviation at all. Two steps, because the host of an accelerator does not know the last one.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import final

from d9d_loop.resilience.resilience_config import BadStepConfig

_MAD_TO_DEVIATION = 1.4826
_LEAST_DEVIATION = 0.01  # of the median
_UNKNOWN_STEPS = 1  # before a step, of which the host of an accelerator knows nothing yet


@final
class LossWindow:
    """The last losses of a job, kept in order too, so that a step's limit costs little.

    Args:
        config: How long the window is, and what a spike is.
    """

    def __init__(self, config: BadStepConfig) -> None:
        self._config = config
        self._window: deque[float] = deque()
        self._sorted: list[float] = []  # the same losses
        self._steps: deque[tuple[int, float]] = deque(maxlen=config.spike_window + _UNKNOWN_STEPS)
        self._late: deque[tuple[int, float]] = deque(maxlen=self._steps.maxlen)  # too new for the window

    def add(self, step: int, loss: float) -> None:
        """Take the loss of a step, later than all before."""
        self._steps.append((step, loss))
        self._late.append((step, loss))

    def limit(self, step: int) -> float:
        """The loss from which on that of a step is a spike; infinite if those before are too few, or nobody asks."""
        if self._config.spike == "ignore":
            return math.inf
        while self._late and self._late[0][0] < step - _UNKNOWN_STEPS:
            self._admit(self._late.popleft()[1])
        return spike_limit(self._sorted, self._config)

    def median(self) -> float:
        """The median of all losses, the latest included."""
        return _median(sorted(loss for _, loss in self._steps))

    def state_dict(self) -> list[list[int | str]]:
        """The losses with their steps, as JSON, to the last bit."""
        return [[step, float(loss).hex()] for step, loss in self._steps]

    def load_state_dict(self, state: Sequence[tuple[int, str]]) -> None:
        """Continue from what `state_dict` gave."""
        for each in (self._window, self._sorted, self._steps, self._late):
            each.clear()
        for step, loss in state:
            self.add(step, float.fromhex(loss))

    def _admit(self, loss: float) -> None:
        self._window.append(loss)
        insort(self._sorted, loss)
        if len(self._window) > self._config.spike_window:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]


def spike_limit(sorted_losses: Sequence[float], config: BadStepConfig) -> float:
    """The equation at the top of this file, for a window in ascending order; infinite if it holds too few."""
    if len(sorted_losses) < config.spike_after:
        return math.inf
    middle = _median(sorted_losses)
    deviation = _MAD_TO_DEVIATION * _median_distance(sorted_losses, middle)
    return middle + config.spike_deviations * max(deviation, _LEAST_DEVIATION * abs(middle))


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _median_distance(ordered: Sequence[float], middle: float) -> float:
    """The median distance of ordered values from one, in logarithmic time."""

    def distance(rank: int) -> float:
        """The rank-th smallest distance: the largest one within the window of so many values that lies closest."""
        starts = range(len(ordered) - rank)
        start = bisect_left(starts, True, key=lambda i: middle - ordered[i] <= ordered[i + rank] - middle)
        return max(middle - ordered[start], ordered[start + rank - 1] - middle)

    half = len(ordered) // 2
    return distance(half + 1) if len(ordered) % 2 else (distance(half) + distance(half + 1)) / 2
