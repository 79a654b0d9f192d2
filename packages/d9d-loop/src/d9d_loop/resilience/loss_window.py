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
from collections import deque
from collections.abc import Sequence
from typing import final

from d9d_loop.resilience.resilience_config import BadStepConfig

_MAD_TO_DEVIATION = 1.4826
_LEAST_DEVIATION = 0.01  # relative to the median
_UNKNOWN_STEPS = 1  # on an accelerator, the loss of a step reaches the host this many steps late


@final
class LossWindow:
    """Recent losses of a job."""

    def __init__(self, config: BadStepConfig) -> None:
        self._config = config
        self._steps: deque[tuple[int, float]] = deque(maxlen=config.spike_window + _UNKNOWN_STEPS)

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step. Steps must be added in ascending order."""
        self._steps.append((step, loss))

    def limit(self, step: int) -> float:
        """Return the limit above which the loss of a step is a spike.

        Infinite if there are too few earlier losses, or if the configuration ignores spikes.
        """
        return math.inf if self._config.spike == "ignore" else _spike_limit(self._known(step), self._config)

    def is_spike(self, step: int, loss: float) -> bool:
        """Return True if the loss of a step is above `limit(step)`."""
        if self._config.spike == "ignore" or len(self._steps) < self._config.spike_after:
            return False
        losses = self._known(step)
        # The median is below the limit, and takes less time to compute.
        return bool(losses) and loss > _median(losses) and loss > _spike_limit(losses, self._config)

    def median(self) -> float:
        """Return the median of the recent losses, including the latest."""
        return _median(sorted(loss for _, loss in self._steps))

    def state_dict(self) -> list[list[int | str]]:
        """Return [step, loss] pairs for JSON. Losses are hexadecimal strings, which are exact."""
        return [[step, float(loss).hex()] for step, loss in self._steps]

    def load_state_dict(self, state: Sequence[tuple[int, str]]) -> None:
        """Restore the losses from the result of `state_dict`."""
        self._steps.clear()
        self._steps.extend((step, float.fromhex(loss)) for step, loss in state)

    def _known(self, step: int) -> list[float]:
        """Return the losses in the window that an accelerator's host already knows in `step`, in ascending order."""
        known = [loss for earlier, loss in self._steps if earlier < step - _UNKNOWN_STEPS]
        return sorted(known[-self._config.spike_window :])


def _spike_limit(losses: Sequence[float], config: BadStepConfig) -> float:
    """Return the spike limit of losses in ascending order; infinite for fewer than `config.spike_after` losses."""
    if len(losses) < config.spike_after:
        return math.inf
    middle, deviation = _spread(losses)
    limit = middle + config.spike_deviations * max(deviation, _LEAST_DEVIATION * abs(middle))
    if losses[0] <= 0:
        return limit
    middle, deviation = _spread([math.log(loss) for loss in losses])
    # A larger exponent would overflow; such a limit is above every loss.
    exponent = min(middle + config.spike_deviations * max(deviation, _LEAST_DEVIATION), 700.0)
    return max(limit, math.exp(exponent))


def _spread(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the estimate of the standard deviation from MAD."""
    middle = _median(ordered)
    return middle, _MAD_TO_DEVIATION * _median(sorted([abs(value - middle) for value in ordered]))


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
