"""Brings samples of about one length together, so that little of a padded batch is padding."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.shuffled_stream import shuffled
from d9d_loop.data.window_cursor import WindowCursor


@final
class BucketedStream(SampleStream):
    """A stream of which each window is sorted by length and cut into groups, which are then shuffled.

    Nothing is lost and nothing comes twice: only the order changes, within a window.

    Args:
        stream: The stream to bring into groups.
        group_size: Samples of a group: the size of a microbatch, or a multiple of it.
        num_groups: Groups of a window; the more there are, the closer are their lengths.
        seed: Chooses the order of the groups.

    Raises:
        UserError: If a group or a window is empty.
    """

    def __init__(self, stream: SampleStream, *, group_size: int, num_groups: int = 64, seed: int) -> None:
        for name, value in (("group_size", group_size), ("num_groups", num_groups)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        self._stream, self._group_size, self._num_groups, self._seed = stream, group_size, num_groups, seed

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream; one inside of a window takes it from its stream again."""
        return WindowCursor(self._stream, state, size=self._group_size * self._num_groups, arrange=self._arrange)

    def read(self, entry: Entry) -> Any:
        """The sample of an entry."""
        return self._stream.read(entry)

    def length(self, entry: Entry) -> int:
        """The length of an entry's sample."""
        return self._stream.length(entry)

    def identity(self) -> JsonValue:
        """Sizes, seed, and what is brought into groups."""
        sizes = {"group_size": self._group_size, "num_groups": self._num_groups}
        return {"bucketed": {**sizes, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        size = self._group_size
        by_length = sorted(entries, key=self._stream.length)
        groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
        arranged = shuffled(groups, seed=self._seed, purpose="bucketed window", window=window)
        return [entry for group in arranged for entry in group]
