"""Cursor of streams that rearrange another stream window by window, and can resume inside a window."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import final

from pydantic import JsonValue, TypeAdapter

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream

Arrange = Callable[[list[Entry], int], list[Entry]]
"""Pure function from the entries of a window and the window index to new entries, possibly none."""

_MOST_EMPTY = 100
"""Number of consecutive windows without new entries after which `take` raises an error."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Position in the rearranged stream.

    Attributes:
        start: Cursor state of the underlying stream at the start of the window.
        offset: Number of the window's rearranged entries that were taken.
    """

    window: int = 0
    start: JsonValue = field(default=None)
    offset: int = 0


_PLACE = TypeAdapter(_Place)


@final
class WindowCursor(Cursor):
    """Cursor that takes windows of `size` entries from a stream and returns their rearranged entries.

    A window is a pure function of its start. So the state is only the window's index and start, and an offset in
    the window; on resume, the window is arranged again.
    """

    def __init__(self, stream: SampleStream, state: JsonValue, *, size: int, arrange: Arrange) -> None:
        place = _Place() if state is None else _PLACE.validate_python(state)
        self._size, self._arrange = size, arrange
        self._window, self._start, self._offset = place.window, place.start, place.offset
        self._cursor = stream.cursor(place.start)
        self._arranged: list[Entry] | None = None
        self._num_empty = 0

    def take(self, num_entries: int) -> list[Entry]:
        """Return the next rearranged entries. The last window of a finite stream may be smaller."""
        taken: list[Entry] = []
        while len(taken) < num_entries:
            if self._arranged is None:
                if (arranged := self._arrange_window()) is None:
                    break
                self._arranged = arranged
            stop = self._offset + num_entries - len(taken)
            taken += self._arranged[self._offset : stop]
            self._offset = min(stop, len(self._arranged))
            if self._offset == len(self._arranged):
                self._window, self._start, self._offset = self._window + 1, self._cursor.state_dict(), 0
                self._arranged = None
        return taken

    def _arrange_window(self) -> list[Entry] | None:
        """Return the entries of the next window, rearranged; None at the end of the stream."""
        if not (entries := self._cursor.take(self._size)):
            return None
        arranged = self._arrange(entries, self._window)
        self._num_empty = 0 if arranged else self._num_empty + 1
        if self._num_empty == _MOST_EMPTY:
            raise UserError(
                f"{_MOST_EMPTY * self._size} consecutive samples gave no documents; expected documents of two "
                "tokens or more. Check how the samples are converted."
            )
        return arranged

    def state_dict(self) -> JsonValue:
        """Return the index and start of the current window, and the offset inside it."""
        return asdict(_Place(self._window, self._start, self._offset))
