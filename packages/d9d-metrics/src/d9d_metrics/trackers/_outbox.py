"""Queue of tracker entries from the run's thread to a tracker's thread, and an in-memory implementation."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, final

from pydantic import JsonValue

from d9d_metrics.trackers.values import Tracked

_POLL_SECONDS = 0.05


class StepValues(NamedTuple):
    """Entry with the values of a step."""

    step: int
    values: Mapping[str, Tracked]


class RunConfig(NamedTuple):
    """Entry with the configuration of a run."""

    config: Mapping[str, JsonValue]


class Rollback(NamedTuple):
    """Entry for a rollback: the steps after `step` run again."""

    step: int


class Flush(NamedTuple):
    """Entry that requires all earlier entries to be durable."""


Entry: TypeAlias = StepValues | RunConfig | Rollback | Flush
"""Queued call of a tracker."""


class Outbox(ABC):
    """Queue from the run's thread to a tracker's thread, which polls the queue every 50 ms.

    Waking a thread would take longer than everything else that the run's thread does per entry. Rollbacks and flushes
    are appended even if the queue is full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_put = self._num_dropped = 0
        self._entries: deque[Entry | None] = deque()
        self._wake = threading.Event()

    def put(self, entry: Entry) -> None:
        """Append an entry, or drop and count it if the queue is full. Never blocks."""
        if len(self._entries) >= self._capacity and not isinstance(entry, Rollback | Flush):
            self._num_dropped += 1
        else:
            self._num_put += 1
            self._entries.append(entry)

    def close(self) -> None:
        """Accept no more entries; `head` returns `None` after the last entry."""
        self._entries.append(None)
        self._wake.set()

    def _take(self) -> Entry | None:
        """Remove and return the oldest entry of the queue, waiting for one; `None` after the last entry."""
        while not self._entries:
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
        return self._entries.popleft()

    @abstractmethod
    def head(self) -> Entry | None:
        """Return the oldest undelivered entry, waiting for one; `None` if the outbox is closed and empty."""

    @abstractmethod
    def delivered(self) -> None:
        """Advance to the next entry, after the tracker processed the result of `head`."""

    @abstractmethod
    def flushed(self) -> None:
        """Discard all delivered entries, which the tracker has written durably."""

    @abstractmethod
    def failed(self) -> None:
        """Make `head` return the oldest entry that the outbox holds, after the tracker was closed on an error."""

    @abstractmethod
    def flush(self, seconds: float) -> bool:
        """Wait until all entries are durable; return False after `seconds`, or if the tracker is failing."""

    @abstractmethod
    def forget_after(self, step: int) -> None:
        """Discard the entries of steps after `step`. Called before the first `put`."""

    def load_state(self) -> dict[str, JsonValue]:
        """Return the state of the last `save_state`, possibly of an earlier process; else an empty state."""
        return {}

    @abstractmethod
    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Save the state that identifies the tracker's run."""

    @abstractmethod
    def describe_rest(self) -> str:
        """Describe the undelivered and dropped entries; empty if there are none."""


@final
class MemoryOutbox(Outbox):
    """In-memory queue of entries; undelivered entries are lost when the process ends."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._head: Entry | None = None
        self._num_delivered = 0
        # Guards the condition of `flush`.
        self._changed = threading.Condition()
        self._is_failing = False

    def head(self) -> Entry | None:
        if self._head is None:
            self._head = self._take()
        return self._head

    def delivered(self) -> None:
        self._head = None
        with self._changed:
            self._num_delivered += 1
            self._is_failing = False
            self._changed.notify_all()

    def flushed(self) -> None:
        """Do nothing: delivered entries are not kept."""

    def failed(self) -> None:
        with self._changed:
            self._is_failing = True
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until the tracker has processed all entries or is failing. The last entry must be a `Flush`."""
        wanted = self._num_put
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: self._num_delivered >= wanted or self._is_failing, timeout=seconds)
            # If the tracker hangs, wait only once, not at every checkpoint.
            self._is_failing = self._num_delivered < wanted
            return not self._is_failing

    def forget_after(self, step: int) -> None:
        """Do nothing: the in-memory queue starts empty in every process."""

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing: the checkpoint has the state."""

    def describe_rest(self) -> str:
        lost = self._num_put - self._num_delivered + self._num_dropped
        return f"{lost} entries are lost" if lost else ""
