"""Expected goodput with failures, and the save period that maximizes it.

    T = sqrt(2 S M) - S        M = 24 h / (N f)        goodput = 1 / (1 + S / T + (T / 2 + R) / M)

T: steps are saved every T seconds. S: seconds that a save stops the job. M: mean time between failures, in s.
N: devices; f: failures per device and day. R: seconds to restart, and to load the last checkpoint.
Young 1974, https://doi.org/10.1145/361147.361115; Daly 2006, https://doi.org/10.1016/j.future.2004.11.016, equation 20
for S << M.
"""

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Goodput:
    """Fraction of the time that is spent on steps that are kept, with the best save period in seconds."""

    fraction: float
    save_seconds: float
    failure_seconds: float


def goodput(
    num_devices: int, *, failures_per_device_day: float, save_cost: float = 5.0, restart: float = 600.0
) -> Goodput:
    """Return the goodput of a job that saves at the best period. Costs are in seconds."""
    between = 86400 / (num_devices * failures_per_device_day)
    period = max(save_cost, sqrt(2 * save_cost * between) - save_cost)
    fraction = 1 / (1 + save_cost / period + (period / 2 + restart) / between)
    return Goodput(fraction, period, between)
