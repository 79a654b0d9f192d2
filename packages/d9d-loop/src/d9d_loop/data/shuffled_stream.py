"""Shuffling of a sequential stream within windows."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError, stream_key
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.window_cursor import WindowCursor


def shuffled(entries: list[Entry], *, seed: int, purpose: str, window: int) -> list[Entry]:
    """Return the entries in a pseudorandom order, which is a function of their number and the other arguments.

    Different purposes give independent orders.
    """
    order = SampleOrder(len(entries), seed=stream_key(seed, purpose, window))
    return [entries[index] for index in order.take(0, len(entries))]


@final
class ShuffledStream(SampleStream):
    """Stream whose windows are shuffled.

    Unlike with a shuffle buffer, no sample is lost on resume: the window is taken from the stream again.

    Raises:
        UserError: If `window` is below 1.
    """

    def __init__(self, stream: SampleStream, *, window: int, seed: int) -> None:
        if window < 1:
            raise UserError(f"window = {window}; expected at least 1 entry to shuffle.")
        self._stream, self._window, self._seed = stream, window, seed
        self.is_endless = stream.is_endless

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor. If `state` points into a window, the whole window is taken and shuffled again."""
        return WindowCursor(self._stream, state, size=self._window, arrange=self._arrange)

    def read(self, entry: Entry) -> Any:
        """Read the sample that `entry` points to."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """Return the sample length in tokens."""
        return self._stream.length(entry)

    def identity(self) -> JsonValue:
        """Return the window, the seed, and the identity of the shuffled stream."""
        return {"shuffled": {"window": self._window, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        return shuffled(entries, seed=self._seed, purpose="shuffled window", window=window)
