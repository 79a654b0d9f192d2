"""Peak memory of a job: the maximum over its ranks."""

import sys
from typing import final

import torch
from torch import Tensor

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric

_GIB = 2**30


@final
class PeakMemory(Metric):
    """Peak memory of the rank that uses most, in GiB (2**30 bytes).

    On an accelerator this is the peak of torch's allocated memory since the last `reset`. On CPU, it is the peak
    resident set since the process started, which cannot be reset.
    """

    def __init__(self) -> None:
        self._bytes = Accumulator("max")

    def update(self) -> None:
        """Read the current peak of the metric's device."""
        self._bytes.update(peak_bytes(self._bytes.value.device))

    def reset(self) -> None:
        """Reset the metric, and the device's peak statistics on an accelerator."""
        super().reset()
        device = self._bytes.value.device
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)

    def compute(self) -> Tensor:
        """Return the peak in GiB: a float64 scalar; 0 without an update."""
        return self._bytes.value.clamp(min=0) / _GIB


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of an accelerator in bytes; for the CPU, the peak resident set of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    import resource  # noqa: PLC0415 - POSIX only

    # `ru_maxrss` is in kilobytes on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
