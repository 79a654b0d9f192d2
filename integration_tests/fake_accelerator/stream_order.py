"""Partial order of logged device operations: which operation must be complete before another one can start."""

from typing import final

from fake_accelerator.device_log import DeviceEntry, DeviceLog

_WORK = frozenset({"kernel", "copy", "copy in", "copy out", "collective"})


@final
class StreamOrder:
    """Partial order of the kernels, copies and collectives of a log.

    An operation follows all earlier operations of its stream, and the operations that its stream waited for by events.
    Unordered operations can run at the same time.
    """

    def __init__(self, log: DeviceLog) -> None:
        # A vector clock: the number of completed operations of each stream.
        now: dict[int, dict[int, int]] = {}
        at_event: dict[int, dict[int, int]] = {}
        self._work: list[tuple[DeviceEntry, dict[int, int]]] = []
        self._place: dict[int, int] = {}
        for entry in log.entries:
            clock = now.setdefault(entry.stream, {})
            if entry.kind == "event record":
                at_event[entry.number] = dict(clock)
            elif entry.kind == "event wait":
                for stream, count in at_event.get(entry.number, {}).items():
                    clock[stream] = max(clock.get(stream, 0), count)
            elif entry.kind in _WORK:
                self._place[id(entry)] = len(self._work)
                self._work.append((entry, dict(clock)))
                clock[entry.stream] = clock.get(entry.stream, 0) + 1

    def precedes(self, first: DeviceEntry, second: DeviceEntry) -> bool:
        """Return True if `first` must be complete before `second` starts."""
        before_first = self._work[self._place[id(first)]][1]
        before_second = self._work[self._place[id(second)]][1]
        return before_second.get(first.stream, 0) > before_first.get(first.stream, 0)

    def beside(self, entry: DeviceEntry, *, name: str) -> list[DeviceEntry]:
        """Return the kernels that can run at the same time as an operation and whose names contain `name`."""
        return [
            other
            for other, _ in self._work
            if other.kind == "kernel"
            and other is not entry
            and name in other.name
            and not self.precedes(other, entry)
            and not self.precedes(entry, other)
        ]
