"""Shuffling of a sequential stream within windows."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError, stream_key
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Entry, SampleStream
from d9d_loop.data.windowed_stream import WindowedStream


def shuffled(entries: list[Entry], *, seed: int, purpose: str, window: int) -> list[Entry]:
    """Return the entries in a pseudorandom order, which is a function of their number and the other arguments.

    Different purposes give independent orders.
    """
    order = SampleOrder(len(entries), seed=stream_key(seed, purpose, window))
    return [entries[index] for index in order.take(0, len(entries))]


@final
class ShuffledStream(WindowedStream):
    """Stream whose windows are shuffled.

    Unlike with a shuffle buffer, no sample is lost on resume: the window is taken from the stream again.

    Raises:
        UserError: If `window` is below 1.
    """

    def __init__(self, stream: SampleStream, *, window: int, seed: int) -> None:
        if window < 1:
            raise UserError(f"window = {window}; expected at least 1 entry to shuffle.")
        super().__init__(stream, size=window)
        self._seed = seed

    def read(self, entry: Entry) -> Any:
        """Read the sample that `entry` points to."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """Return the sample length in tokens."""
        return self._stream.length(entry)

    def identity(self) -> JsonValue:
        """Return the window, the seed, and the identity of the shuffled stream."""
        return {"shuffled": {"window": self._size, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        return shuffled(entries, seed=self._seed, purpose="shuffled window", window=window)
