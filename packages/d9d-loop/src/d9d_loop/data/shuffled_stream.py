"""Shuffles a stream that can only be read in its own order, as far as a window reaches."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError, stream_key
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.window_cursor import WindowCursor
from d9d_loop.sample_order import SampleOrder


def shuffled(entries: list[Entry], *, seed: int, purpose: str, window: int) -> list[Entry]:
    """Entries in another order, a function of the other arguments."""
    order = SampleOrder(len(entries), seed=stream_key(seed, purpose, window))
    return [entries[index] for index in order.take(0, len(entries))]


@final
class ShuffledStream(SampleStream):
    """A stream of which each window is shuffled.

    Unlike a shuffle buffer, which must be filled anew, it loses nothing when a job resumes: the window is read again.

    Args:
        stream: The stream to shuffle.
        window: Entries that are shuffled together.
        seed: Chooses the order of each window.

    Raises:
        UserError: If a window has no entries.
    """

    def __init__(self, stream: SampleStream, *, window: int, seed: int) -> None:
        if window < 1:
            raise UserError(f"window = {window}; expected at least 1 entry to shuffle.")
        self._stream, self._window, self._seed = stream, window, seed

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream; one inside of a window takes it from its stream again."""
        return WindowCursor(self._stream, state, size=self._window, arrange=self._arrange)

    def read(self, entry: Entry) -> Any:
        """The sample of an entry."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """The length of an entry's sample."""
        return self._stream.length(entry)

    def identity(self) -> JsonValue:
        """Window, seed, and what is shuffled."""
        return {"shuffled": {"window": self._window, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        return shuffled(entries, seed=self._seed, purpose="shuffled window", window=window)
