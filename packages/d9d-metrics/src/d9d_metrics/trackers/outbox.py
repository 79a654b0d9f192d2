"""Where values wait for a tracker that is slower than the run: in memory, for trackers that are files themselves."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

from pydantic import JsonValue

from d9d_metrics.trackers.values import Tracked


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to hand to a tracker: the values of a step, or the configuration where there is no step.

    Attributes:
        step: The step.
        values: The values of the step.
        config: The configuration.
    """

    step: int | None
    values: Mapping[str, Tracked] = field(default_factory=dict)
    config: Mapping[str, JsonValue] = field(default_factory=dict)


class Outbox(Protocol):
    """A queue from the run's thread to that of a tracker. Only `put` is called during steps, and it never waits."""

    def put(self, entry: Entry) -> None:
        """Take in an entry; it is left out, and counted, if there is no room."""
        ...

    def head(self) -> Entry | None:
        """Wait for an entry that was not delivered yet; `None` once the outbox is closed and has none."""
        ...

    def delivered(self) -> None:
        """Let go of the entry that `head` returned."""
        ...

    def failed(self) -> None:
        """Hear that the tracker did not take it; it will be tried again."""
        ...

    def flush(self, seconds: float) -> bool:
        """Wait until what was put would survive the process; whether that came true in time."""
        ...

    def forget_after(self, step: int) -> None:
        """Let go of entries of later steps. Called before anything is put."""
        ...

    def load_state(self) -> dict[str, JsonValue]:
        """What `save_state` kept, in whichever life of the run."""
        ...

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Keep what finds the tracker's run again."""
        ...

    def close(self) -> None:
        """Take nothing in any more."""
        ...

    def describe_rest(self) -> str:
        """What is undelivered or was left out, for a person; empty if all is well."""
        ...


@final
class MemoryOutbox:
    """Keeps entries in memory: what the tracker has not taken is lost with the process.

    Args:
        capacity: How many entries may wait.
    """

    def __init__(self, capacity: int) -> None:
        self._entries: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._capacity = capacity
        self._left_out = 0
        self._is_closed = self._is_failing = False

    def put(self, entry: Entry) -> None:
        """Append it."""
        with self._changed:
            if len(self._entries) < self._capacity:
                self._entries.append(entry)
                self._changed.notify_all()
            else:
                self._left_out += 1

    def head(self) -> Entry | None:
        """Return the oldest one."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._is_closed)
            return self._entries[0] if self._entries else None

    def delivered(self) -> None:
        """Remove the oldest one."""
        with self._changed:
            self._entries.popleft()
            self._is_failing = False
            self._changed.notify_all()

    def failed(self) -> None:
        """Let nobody wait for a tracker that is down."""
        with self._changed:
            self._is_failing = True
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until the tracker has everything, or is down."""
        with self._changed:
            self._changed.wait_for(lambda: not self._entries or self._is_failing, timeout=seconds)
            return not self._entries

    def forget_after(self, step: int) -> None:
        """Do nothing: there is nothing from before."""

    def load_state(self) -> dict[str, JsonValue]:
        """Return nothing."""
        return {}

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Let `head` end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def describe_rest(self) -> str:
        """Return how many are lost."""
        with self._changed:
            lost = len(self._entries) + self._left_out
        return f"{lost} entries are lost" if lost else ""


def seconds_left(deadline: float) -> float:
    """The time until a moment of `time.monotonic`, in seconds; never negative."""
    return max(0.0, deadline - time.monotonic())
