"""How much memory a job needs at most, on the rank that needs most."""

import sys
from typing import final

import torch
from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric

_GIB = 2**30


@final
class PeakMemory(Metric):
    """The peak memory of the rank that needs most, in GiB (2**30 bytes).

    On an accelerator it is what torch allocated since the last `reset`. On CPU it is the process's resident set since
    it began, because the operating system knows no other.
    """

    def __init__(self) -> None:
        self._bytes = Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the peak in bytes."""
        return {"bytes": self._bytes}

    def update(self) -> None:
        """Read the peak of the metric's device so far."""
        self._bytes.update(peak_bytes(self._bytes.value.device))

    def reset(self) -> None:
        """Start a new peak."""
        super().reset()
        device = self._bytes.value.device
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)

    def compute(self) -> Tensor:
        """Return the peak in GiB: a float64 scalar; 0 of nothing."""
        return self._bytes.value.clamp(min=0) / _GIB


def peak_bytes(device: torch.device) -> int:
    """The peak memory of a device, in bytes.

    Args:
        device: An accelerator, or the CPU for this process.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    import resource  # noqa: PLC0415 - POSIX only

    # In kilobytes, except where it is in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
