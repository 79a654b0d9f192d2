"""Measurement of step durations and of the time spent in data loading and communication, on host and device."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch


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


class _Section(Protocol):
    """Time interval that starts when the object is created."""

    def end(self) -> None: ...

    def is_over(self) -> bool: ...

    def seconds(self) -> float: ...


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
        section = _HostSection(self._now) if self._device.type == "cpu" else _DeviceSection(self._device)
        yield
        section.end()
        self._sections.append(section)

    def step(self) -> list[StepSeconds]:
        """End a step; return the finished steps that were not returned before, in order (on CPU, this step)."""
        now = self._now()
        self._pending.append((now - self._since, self._data_wait, self._sections))
        self._since, self._data_wait, self._sections = now, 0.0, []
        finished = []
        while self._pending and all(section.is_over() for section in self._pending[0][2]):
            total, data_wait, sections = self._pending.popleft()
            finished.append(StepSeconds(total, data_wait, sum(section.seconds() for section in sections)))
        return finished

    def skip(self) -> None:
        """Exclude the time since the end of the last step, e.g. after an evaluation."""
        self._since, self._data_wait, self._sections = self._now(), 0.0, []


@final
class _HostSection:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._seconds = now, 0.0
        self._start = now()

    def end(self) -> None:
        self._seconds = self._now() - self._start

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


@final
class _DeviceSection:
    def __init__(self, device: torch.device) -> None:
        self._start, self._end = (torch.Event(device, enable_timing=True) for _ in range(2))
        self._start.record()

    def end(self) -> None:
        self._end.record()

    def is_over(self) -> bool:
        return self._end.query()

    def seconds(self) -> float:
        return self._start.elapsed_time(self._end) / 1e3  # from milliseconds
