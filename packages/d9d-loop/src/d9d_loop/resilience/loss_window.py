"""Window of recent losses, and the limit above which a loss is a spike.

A loss is a spike if it exceeds

    median + deviations * max(1.4826 * MAD, 0.01 * |median|)

of a window of losses that ends two steps before it. If all losses of the window are positive, its logarithm must also
exceed the limit of this formula for their logarithms, with 0.01 instead of 0.01 * |median|. For losses that vary by a
few percent both limits are about equal. The losses of small batches often have a long tail: values of several times the
median are common, and the second limit grows with the tail. MAD is the median absolute deviation from the median (Leys
et al.: "Detecting outliers", 2013). 1.4826 MAD estimates the standard deviation of a normal distribution. The other
term is a lower bound for plateaus, where MAD is close to 0. The window excludes the previous step, because the host of
an accelerator does not know its loss yet.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import final

from d9d_loop.resilience.resilience_config import BadStepConfig

_MAD_TO_DEVIATION = 1.4826
_LEAST_DEVIATION = 0.01  # relative to the median
_UNKNOWN_STEPS = 1  # on an accelerator, the loss of a step reaches the host this many steps late


@final
class LossWindow:
    """Recent losses of a job. A sorted copy makes the spike limit of a step cheap to compute."""

    def __init__(self, config: BadStepConfig) -> None:
        self._config = config
        self._window: deque[float] = deque()
        self._sorted: list[float] = []  # the losses of `_window`, in ascending order
        self._steps: deque[tuple[int, float]] = deque(maxlen=config.spike_window + _UNKNOWN_STEPS)
        self._late: deque[tuple[int, float]] = deque(maxlen=self._steps.maxlen)  # too recent for the window

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step. Steps must be added in ascending order."""
        self._steps.append((step, loss))
        self._late.append((step, loss))

    def limit(self, step: int) -> float:
        """Return the limit above which the loss of a step is a spike.

        Infinite if there are too few earlier losses, or if the configuration ignores spikes.
        """
        if self._config.spike == "ignore":
            return math.inf
        self._admit_until(step)
        return spike_limit(self._sorted, self._config)

    def is_spike(self, step: int, loss: float) -> bool:
        """Return True if the loss of a step is above `limit(step)`."""
        if self._config.spike == "ignore":
            return False
        self._admit_until(step)
        if len(self._sorted) < self._config.spike_after:
            return False
        return loss > _least_limit(self._sorted, self._config) and loss > spike_limit(self._sorted, self._config)

    def median(self) -> float:
        """Return the median of the recent losses, including the latest."""
        return median(loss for _, loss in self._steps)

    def state_dict(self) -> list[list[int | str]]:
        """Return [step, loss] pairs for JSON. Losses are hexadecimal strings, which are exact."""
        return [[step, float(loss).hex()] for step, loss in self._steps]

    def load_state_dict(self, state: Sequence[tuple[int, str]]) -> None:
        """Restore the losses from the result of `state_dict`."""
        for each in (self._window, self._sorted, self._steps, self._late):
            each.clear()
        for step, loss in state:
            self.add(step, float.fromhex(loss))

    def _admit_until(self, step: int) -> None:
        """Move the losses that the host of an accelerator knows by step `step` into the window."""
        while self._late and self._late[0][0] < step - _UNKNOWN_STEPS:
            self._admit(self._late.popleft()[1])

    def _admit(self, loss: float) -> None:
        self._window.append(loss)
        insort(self._sorted, loss)
        if len(self._window) > self._config.spike_window:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]


def spike_limit(sorted_losses: Sequence[float], config: BadStepConfig) -> float:
    """Return the spike limit of the module docstring for losses in ascending order.

    Infinite for fewer than `config.spike_after` losses.
    """
    if len(sorted_losses) < config.spike_after:
        return math.inf
    middle = median(sorted_losses)
    deviation = max(_deviation(sorted_losses, middle), _LEAST_DEVIATION * abs(middle))
    limit = middle + config.spike_deviations * deviation
    if sorted_losses[0] <= 0:
        return limit
    logarithms = [math.log(loss) for loss in sorted_losses]
    middle = median(logarithms)
    deviation = max(_deviation(logarithms, middle), _LEAST_DEVIATION)
    # Clamp the exponent: math.exp overflows above 709. A limit of exp(700) is above every real loss.
    return max(limit, math.exp(min(middle + config.spike_deviations * deviation, 700.0)))


def _least_limit(sorted_losses: Sequence[float], config: BadStepConfig) -> float:
    """Return a lower bound of `spike_limit`, which is cheaper to compute; most losses are below it.

    Indices q to q + n // 2 hold more than half of the losses. So MAD is at least the distance from the median to the
    nearer of the losses at these two indices.
    """
    middle, num = median(sorted_losses), len(sorted_losses)
    first = num // 4
    reach = min(middle - sorted_losses[first], sorted_losses[first + num // 2] - middle)
    return middle + config.spike_deviations * max(_MAD_TO_DEVIATION * reach, _LEAST_DEVIATION * abs(middle))


def _deviation(values: Sequence[float], middle: float) -> float:
    return _MAD_TO_DEVIATION * median(abs(value - middle) for value in values)
