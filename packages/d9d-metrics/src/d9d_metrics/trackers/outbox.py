"""Where values wait for a tracker that is slower than the run: in memory, for trackers that are files themselves."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias, final

from pydantic import JsonValue

from d9d_metrics.trackers.values import Tracked

_LOOK_SECONDS = 0.05


class StepValues(NamedTuple):
    """The values of a step, on their way to a tracker."""

    step: int
    values: Mapping[str, Tracked]


class RunConfig(NamedTuple):
    """The configuration of a run, on its way to a tracker."""

    config: Mapping[str, JsonValue]


class GoBack(NamedTuple):
    """The steps after this one will be taken again."""

    step: int


class Flush(NamedTuple):
    """Everything before this entry must become durable."""


Entry: TypeAlias = StepValues | RunConfig | GoBack | Flush
"""One thing to hand to a tracker."""


class Outbox(Protocol):
    """A queue from the run's thread to that of a tracker. Only `put` is called during steps, and it never waits."""

    def put(self, entry: Entry) -> None:
        """Take in an entry; it is left out, and counted, if there is no room."""
        ...

    def head(self) -> Entry | None:
        """Wait for an entry that was not delivered yet; `None` once the outbox is closed and has none."""
        ...

    def delivered(self) -> None:
        """Go on to the next entry: the tracker took the one that `head` returned."""
        ...

    def flushed(self) -> None:
        """Let go of all delivered entries: the tracker has written them out."""
        ...

    def failed(self) -> None:
        """Go back to the oldest entry that the outbox still holds: the tracker was closed after an error."""
        ...

    def flush(self, seconds: float) -> bool:
        """Wait until everything that was put is durable.

        Returns:
            False if that takes longer, or is not to be expected soon.
        """
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
class Inbox:
    """The way from the run's thread to a tracker's: its reader looks into it several times a second.

    To wake a thread takes longer than all else that the run's thread does for an entry.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry | None] = deque()
        self._look_now = threading.Event()

    def __len__(self) -> int:
        """Return how many entries wait."""
        return len(self._entries)

    def put(self, entry: Entry | None) -> None:
        """Append an entry, or the end."""
        self._entries.append(entry)

    def look_now(self) -> None:
        """Wake the reader."""
        self._look_now.set()

    def get(self) -> Entry | None:
        """Wait for the oldest entry, and remove it."""
        while not self._entries:
            self._look_now.wait(_LOOK_SECONDS)
            self._look_now.clear()
        return self._entries.popleft()


@final
class MemoryOutbox:
    """Keeps entries in memory: what the tracker has not taken is lost with the process.

    Args:
        capacity: How many entries may wait.
    """

    def __init__(self, capacity: int) -> None:
        self._incoming = Inbox()
        self._head: Entry | None = None
        self._capacity = capacity
        self._num_put = self._num_delivered = self._left_out = 0
        # Guards what `flush` waits for; `put` does not take it.
        self._changed = threading.Condition()
        self._is_failing = False

    def put(self, entry: Entry) -> None:
        """Append it."""
        if len(self._incoming) >= self._capacity and not isinstance(entry, GoBack | Flush):
            self._left_out += 1
        else:
            self._num_put += 1
            self._incoming.put(entry)

    def head(self) -> Entry | None:
        """Return the oldest one."""
        if self._head is None:
            self._head = self._incoming.get()
        return self._head

    def delivered(self) -> None:
        """Remove the oldest one."""
        self._head = None
        with self._changed:
            self._num_delivered += 1
            self._is_failing = False
            self._changed.notify_all()

    def flushed(self) -> None:
        """Do nothing: no entry is kept once it is delivered."""

    def failed(self) -> None:
        """Let nobody wait for a tracker that is down."""
        with self._changed:
            self._is_failing = True
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until the tracker has everything, or is down; the last entry is a `Flush`."""
        wanted = self._num_put
        self._incoming.look_now()
        with self._changed:
            self._changed.wait_for(lambda: self._num_delivered >= wanted or self._is_failing, timeout=seconds)
            # A tracker that hangs is waited for once, not at every checkpoint.
            self._is_failing = self._num_delivered < wanted
            return not self._is_failing

    def forget_after(self, step: int) -> None:
        """Do nothing: there is nothing from before."""

    def load_state(self) -> dict[str, JsonValue]:
        """Return nothing."""
        return {}

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Let `head` end."""
        self._incoming.put(None)
        self._incoming.look_now()

    def describe_rest(self) -> str:
        """Return how many are lost."""
        lost = self._num_put - self._num_delivered + self._left_out
        return f"{lost} entries are lost" if lost else ""


def seconds_left(deadline: float) -> float:
    """The time until a moment of `time.monotonic`, in seconds; never negative."""
    return max(0.0, deadline - time.monotonic())
