"""Streams that arrange the entries of another one anew, a window at a time, and can go on from inside of a window."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import final

from pydantic import JsonValue, TypeAdapter

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream

Arrange = Callable[[list[Entry], int], list[Entry]]
"""Makes new entries of a window's entries and its number; a pure function of the two, which may give none."""

_MOST_EMPTY = 100
"""After so many windows of nothing one after the other, there is nothing to come."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the arranged stream.

    Attributes:
        window: Number of the window.
        start: Where the window begins in the stream that it is of.
        offset: How many of the window's new entries were taken.
    """

    window: int = 0
    start: JsonValue = field(default=None)
    offset: int = 0


_PLACE = TypeAdapter(_Place)


@final
class WindowCursor(Cursor):
    """Takes a window of entries at a time and hands on what they are arranged into.

    A window is a pure function of where it begins, so a place is that and an offset: what is inside is made again.

    Args:
        stream: The stream that is arranged.
        state: What `state_dict` returned; `None` for the beginning.
        size: Entries of a window.
        arrange: Arranges a window.
    """

    def __init__(self, stream: SampleStream, state: JsonValue, *, size: int, arrange: Arrange) -> None:
        place = _Place() if state is None else _PLACE.validate_python(state)
        self._size, self._arrange = size, arrange
        self._window, self._start, self._offset = place.window, place.start, place.offset
        self._cursor = stream.cursor(place.start)
        self._arranged: list[Entry] | None = None
        self._num_empty = 0

    def take(self, num_entries: int) -> list[Entry]:
        """The next arranged entries."""
        taken: list[Entry] = []
        while len(taken) < num_entries:
            if self._arranged is None:
                self._arranged = self._arrange_window()
            stop = self._offset + num_entries - len(taken)
            taken += self._arranged[self._offset : stop]
            self._offset = min(stop, len(self._arranged))
            if self._offset == len(self._arranged):
                self._window, self._start, self._offset = self._window + 1, self._cursor.state_dict(), 0
                self._arranged = None
        return taken

    def _arrange_window(self) -> list[Entry]:
        arranged = self._arrange(self._cursor.take(self._size), self._window)
        self._num_empty = 0 if arranged else self._num_empty + 1
        if self._num_empty == _MOST_EMPTY:
            raise UserError(
                f"{_MOST_EMPTY * self._size} samples one after the other came to nothing; expected documents of two "
                "tokens or more. Check what the samples are made into."
            )
        return arranged

    def state_dict(self) -> JsonValue:
        """The window's number and beginning, and how much of it was taken."""
        return asdict(_Place(self._window, self._start, self._offset))
