"""Measures what a step takes and what it waits for, on the host and on the device."""

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
    """What a step of one rank took, in seconds.

    Attributes:
        total: From the end of the step before to the end of this one.
        data_wait: Of that, the time in which the rank waited for its batch.
        communication: Of that, the time in which it did nothing but communicate.
    """

    total: float
    data_wait: float
    communication: float


class _Section(Protocol):
    """A stretch of time that began when it was made."""

    def end(self) -> None: ...

    def is_over(self) -> bool: ...

    def seconds(self) -> float: ...


@final
class StepClock:
    """Measures steps and what they wait for, without waiting for a device.

    Data are waited for by the host, so that is measured on the host. Communication is measured where it happens: on an
    accelerator between two events of the current stream, so its steps are known a little later.

    Args:
        device: The device that computes.
        now: Gives the time in seconds.
    """

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._since = now()
        self._data_wait = 0.0
        self._sections: list[_Section] = []
        self._unknown: deque[tuple[float, float, list[_Section]]] = deque()

    @contextmanager
    def data_wait(self) -> Generator[None]:
        """The body waits for data."""
        start = self._now()
        yield
        self._data_wait += self._now() - start

    @contextmanager
    def communication(self) -> Generator[None]:
        """The body does nothing but communicate."""
        section = _HostSection(self._now) if self._device.type == "cpu" else _DeviceSection(self._device)
        yield
        section.end()
        self._sections.append(section)

    def step(self) -> list[StepSeconds]:
        """End a step.

        Returns:
            The steps that are known by now and were not returned before, in order; on CPU that is this step.
        """
        now = self._now()
        self._unknown.append((now - self._since, self._data_wait, self._sections))
        self._since, self._data_wait, self._sections = now, 0.0, []
        known = []
        while self._unknown and all(section.is_over() for section in self._unknown[0][2]):
            total, data_wait, sections = self._unknown.popleft()
            known.append(StepSeconds(total, data_wait, sum(section.seconds() for section in sections)))
        return known

    def skip(self) -> None:
        """Leave out the time since the end of the last step: it was something else, e.g. an evaluation."""
        self._since, self._data_wait, self._sections = self._now(), 0.0, []


@final
class _HostSection:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._taken = now, 0.0
        self._start = now()

    def end(self) -> None:
        self._taken = self._now() - self._start

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._taken


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
