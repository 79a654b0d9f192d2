"""Base class of streams that rearrange another stream window by window, and can resume inside a window."""

from abc import abstractmethod
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream

_MOST_EMPTY = 100
"""Number of consecutive windows without new entries after which `take` raises an error."""


class WindowedStream(SampleStream):
    """Stream that takes windows of `size` entries from another stream and rearranges each window."""

    def __init__(self, stream: SampleStream, *, size: int) -> None:
        self._stream, self._size, self.is_endless = stream, size, stream.is_endless

    @final
    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor. If `state` points into a window, the whole window is taken and arranged again."""
        return _WindowCursor(self, state)

    def read(self, entry: Entry) -> Any:
        """Read the sample of an entry of the other stream."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """Return the sample length in tokens."""
        return self._stream.length(entry)

    @abstractmethod
    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        """Return the new entries of a window, possibly none: a pure function of its entries and its index."""


@final
class _WindowCursor(Cursor):
    """Cursor whose state is the index and the start of a window, and an offset in it; these determine the window."""

    def __init__(self, stream: WindowedStream, state: Any) -> None:
        self._stream = stream
        self._place: dict[str, Any] = {"window": 0, "start": None, "offset": 0} if state is None else dict(state)
        self._cursor = stream._stream.cursor(self._place["start"])
        self._arranged: list[Entry] | None = None
        self._num_empty = 0

    @property
    def is_at_epoch_end(self) -> bool:
        """True if the next entry starts an epoch of a finite stream."""
        return self._arranged is None and self._cursor.is_at_epoch_end

    def take(self, num_entries: int) -> list[Entry]:
        """Return the next rearranged entries. The last window of an epoch of a finite stream may be smaller."""
        taken: list[Entry] = []
        while len(taken) < num_entries:
            if self._arranged is None:
                if taken and self._cursor.is_at_epoch_end:
                    break
                self._arranged = self._arrange_window()
            if self._arranged is None:
                break
            start = self._place["offset"]
            stop = min(start + num_entries - len(taken), len(self._arranged))
            taken += self._arranged[start:stop]
            self._place["offset"] = stop
            if stop == len(self._arranged):
                self._place = {"window": self._place["window"] + 1, "start": self._cursor.state_dict(), "offset": 0}
                self._arranged = None
        return taken

    def state_dict(self) -> JsonValue:
        return dict(self._place)

    def _arrange_window(self) -> list[Entry] | None:
        """Return the entries of the next window, rearranged; None at the end of the stream."""
        if not (entries := self._cursor.take(self._stream._size)):
            return None
        arranged = self._stream._arrange(entries, self._place["window"])
        self._num_empty = 0 if arranged else self._num_empty + 1
        if self._num_empty == _MOST_EMPTY:
            raise UserError(
                f"{_MOST_EMPTY * self._stream._size} consecutive samples gave no documents; expected documents of two "
                "tokens or more. Check how the samples are converted."
            )
        return arranged
