"""Timestamps on the clock of the device: the host for CPU, events of the current stream for an accelerator."""

import time
from typing import TypeAlias, final

import torch

Mark: TypeAlias = float | torch.Event
"""A timestamp: host time in seconds, or an event recorded on the device's stream."""


@final
class Stopwatch:
    """Recorder of timestamps, without host-device synchronization until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.mark()

    def mark(self) -> Mark:
        """Record a timestamp: on the host for CPU, otherwise on the device's current stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """Return the seconds from the stopwatch's creation to a timestamp; waits until the device has reached it."""
        if isinstance(mark, torch.Event):
            assert isinstance(self._start, torch.Event), "all marks of a stopwatch have one type"
            mark.synchronize()
            return self._start.elapsed_time(mark) / 1e3
        assert not isinstance(self._start, torch.Event), "all marks of a stopwatch have one type"
        return mark - self._start
