"""Queue of tracker entries from the run's thread to a tracker's thread, and an in-memory implementation."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, final

from pydantic import JsonValue

from d9d_metrics.trackers.values import from_json, to_json

_POLL_SECONDS = 0.05


class Entry(NamedTuple):
    """Queued call of a tracker's method, with the step and the values or the configuration that it has."""

    method: Literal["log", "log_config", "resume", "flush"]
    step: int = 0
    data: Mapping[str, Any] = {}

    def encode(self) -> list[JsonValue]:
        """Return the JSON form, which `decode` converts back."""
        data = {name: to_json(value) for name, value in self.data.items()} if self.method == "log" else dict(self.data)
        return [self.method, self.step, data]

    @staticmethod
    def decode(record: Any) -> "Entry":
        """Return the entry of a record."""
        method, step, data = record
        return Entry(method, step, {name: from_json(each) for name, each in data.items()} if method == "log" else data)


class Outbox(ABC):
    """Queue from the run's thread to a tracker's thread, which polls the queue every 50 ms.

    Waking a thread would take longer than everything else that the run's thread does per entry. Rollbacks and flushes
    are appended even if the queue is full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_put = self._num_dropped = self._num_done = 0
        self._is_failing = False
        self._entries: deque[Entry | None] = deque()
        self._wake = threading.Event()
        # Guards the condition of `flush`.
        self._changed = threading.Condition()

    def put(self, entry: Entry) -> None:
        """Append an entry, or drop and count it if the queue is full. Never blocks."""
        if len(self._entries) >= self._capacity and entry.method not in ("resume", "flush"):
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

    def flush(self, seconds: float) -> bool:
        """Wait until all entries, the last one a flush, are durable; False after `seconds` or if the tracker fails."""
        wanted = self._num_put
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= wanted or self._is_failing, timeout=seconds)
            # If the tracker or the disk hangs, wait only once, not at every checkpoint.
            self._is_failing = self._num_done < wanted
            return not self._is_failing

    def _count_done(self) -> None:
        with self._changed:
            self._num_done += 1
            self._is_failing = False
            self._changed.notify_all()

    @abstractmethod
    def failed(self) -> None:
        """Rewind `head` to the oldest entry that the outbox holds, after the tracker was closed on an error."""

    def flushed(self) -> None:
        """Discard all delivered entries, which the tracker has written durably."""
        return

    def forget_after(self, step: int) -> None:
        """Discard the entries of steps after `step`, which an earlier process left. Called before the first `put`."""
        return

    def load_state(self) -> dict[str, JsonValue]:
        """Return the state of the last `save_state`, possibly of an earlier process; else an empty state."""
        return {}

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Save the state that identifies the tracker's run, if the outbox outlives the process."""
        return

    @abstractmethod
    def describe_rest(self) -> str:
        """Describe the undelivered and dropped entries; empty if there are none."""


@final
class MemoryOutbox(Outbox):
    """In-memory queue of entries; undelivered entries are lost when the process ends."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._head: Entry | None = None

    def head(self) -> Entry | None:
        if self._head is None:
            self._head = self._take()
        return self._head

    def delivered(self) -> None:
        self._head = None
        self._count_done()

    def failed(self) -> None:
        with self._changed:
            self._is_failing = True
            self._changed.notify_all()

    def describe_rest(self) -> str:
        lost = self._num_put - self._num_done + self._num_dropped
        return f"{lost} entries are lost" if lost else ""
