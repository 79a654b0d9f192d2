"""Shuffling of a stream within windows, of single samples or of groups of samples of similar length."""

from typing import final

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

    def identity(self) -> JsonValue:
        """Return the window, the seed, and the identity of the shuffled stream."""
        return {"shuffled": {"window": self._size, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        return shuffled(entries, seed=self._seed, purpose="shuffled window", window=window)


@final
class BucketedStream(WindowedStream):
    """Stream whose windows are sorted by length and split into groups, which are shuffled.

    Each window is only permuted: no sample is dropped or repeated.

    Args:
        group_size: Number of samples in a group: the microbatch size or a multiple of it.
        num_groups: Number of groups in a window. With more groups, the lengths within a group differ less.

    Raises:
        UserError: If `group_size` or `num_groups` is below 1.
    """

    def __init__(self, stream: SampleStream, *, group_size: int, num_groups: int = 64, seed: int) -> None:
        for name, value in (("group_size", group_size), ("num_groups", num_groups)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        super().__init__(stream, size=group_size * num_groups)
        self._group_size, self._num_groups, self._seed = group_size, num_groups, seed

    def identity(self) -> JsonValue:
        """Return the sizes, the seed, and the identity of the reordered stream."""
        sizes = {"group_size": self._group_size, "num_groups": self._num_groups}
        return {"bucketed": {**sizes, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        size = self._group_size
        by_length = sorted(entries, key=self._stream.length)
        groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
        arranged = shuffled(groups, seed=self._seed, purpose="bucketed window", window=window)
        return [entry for group in arranged for entry in group]
