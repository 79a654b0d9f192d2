"""Groups of samples of similar length, which reduce the padding of batches."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Entry, SampleStream
from d9d_loop.data.shuffled_stream import shuffled
from d9d_loop.data.windowed_stream import WindowedStream


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

    def read(self, entry: Entry) -> Any:
        """Read the sample that `entry` points to."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """Return the sample length in tokens."""
        return self._stream.length(entry)

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
