"""Takes the times of what a rank computes, on the clock of its device."""

import time
from typing import TypeAlias, final

import torch

Mark: TypeAlias = float | torch.Event
"""A moment: when the host, or the stream that computes, came to a place."""


@final
class Stopwatch:
    """Marks moments without waiting for the device, and says afterwards when they were.

    Args:
        device: Where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.mark()

    def mark(self) -> Mark:
        """This moment."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """From the making of the stopwatch to a moment; waits for the device to have come there."""
        if isinstance(mark, torch.Event):
            assert isinstance(self._start, torch.Event), "all marks of a stopwatch are of one kind"
            mark.synchronize()
            return self._start.elapsed_time(mark) / 1e3
        assert not isinstance(self._start, torch.Event), "all marks of a stopwatch are of one kind"
        return mark - self._start
