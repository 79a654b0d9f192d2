"""Measurement of step durations and of the time spent in data loading and communication, on host and device."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

_Mark: TypeAlias = float | torch.Event
_Section: TypeAlias = tuple[_Mark, _Mark]
"""Start and end of a time interval."""


@final
@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Durations of one step on one rank, in seconds.

    Attributes:
        total: From the end of the previous step to the end of this one.
        data_wait: Part of `total` in which the rank waited for its batch.
        communication: Part of `total` in which the rank only communicated, without computing.
    """

    total: float
    data_wait: float
    communication: float


@final
class StepClock:
    """Clock of steps, data loading and communication, without host-device synchronization.

    The wait for data is measured on the host. Communication on an accelerator is measured between two events of the
    current stream, so the durations of a step are returned a few steps later.
    """

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._since = now()
        self._data_wait = 0.0
        self._sections: list[_Section] = []
        self._pending: deque[tuple[float, float, list[_Section]]] = deque()

    @contextmanager
    def data_wait(self) -> Generator[None]:
        """Measure the body as time spent waiting for data."""
        start = self._now()
        yield
        self._data_wait += self._now() - start

    @contextmanager
    def communication(self) -> Generator[None]:
        """Measure the body as communication that does not overlap with computation."""
        start = self._mark()
        yield
        self._sections.append((start, self._mark()))

    def step(self) -> list[StepSeconds]:
        """End a step; return the finished steps that were not returned before, in order (on CPU, this step)."""
        now = self._now()
        self._pending.append((now - self._since, self._data_wait, self._sections))
        self._since, self._data_wait, self._sections = now, 0.0, []
        finished = []
        while self._pending and all(not isinstance(end, torch.Event) or end.query() for _, end in self._pending[0][2]):
            total, data_wait, sections = self._pending.popleft()
            finished.append(StepSeconds(total, data_wait, sum(map(_seconds, sections))))
        return finished

    def skip(self) -> None:
        """Exclude the time since the end of the last step, e.g. after an evaluation."""
        self._since, self._data_wait, self._sections = self._now(), 0.0, []

    def _mark(self) -> _Mark:
        """Return the host's time for the CPU, else an event on the device's current stream."""
        if self._device.type == "cpu":
            return self._now()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _seconds(section: _Section) -> float:
    start, end = section
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return start.elapsed_time(end) / 1e3  # from milliseconds
    assert isinstance(start, float), "both marks of a section have one type"
    assert isinstance(end, float), "both marks of a section have one type"
    return end - start
