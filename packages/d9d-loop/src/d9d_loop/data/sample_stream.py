"""Interface of all data: one order of samples over all ranks, from which each rank reads only its own share.

Planning and reading are separate. Every rank plans the whole stream, which is cheap: a cursor returns small entries
that identify the next samples. A rank reads only its own entries, possibly in worker processes. The state of a stream
is therefore equal on every rank. A job resumes on any number of ranks, right after the last used sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, Protocol

from pydantic import JsonValue

Entry = Any
"""Identifier of a sample for the stream that created the entry. Entries are small and cheap to create."""

Collate = Callable[[list[Any]], Any]
"""Function that builds a batch, a pytree of tensors, from a list of samples."""


class Samples(Sized, Protocol):
    """Map-style dataset with a length, such as a `torch.utils.data.Dataset` or a list."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample at an index in `range(len(self))`, the same sample on every call."""
        ...


class Cursor(ABC):
    """Current position in a stream; `take` advances it."""

    @property
    def is_at_epoch_end(self) -> bool:
        """True if the next entry is known to start another epoch of a finite stream."""
        return False

    @abstractmethod
    def take(self, num_entries: int) -> list[Entry]:
        """Return the next `num_entries` entries; fewer at the end of an epoch of a finite stream, none at its end.

        So a batch of a finite stream has samples of one epoch. Epochs of an endless stream follow without a gap.
        """

    @abstractmethod
    def state_dict(self) -> JsonValue:
        """Return the position after the last taken entry, for `SampleStream.cursor`. Its size is bounded."""


class SampleStream(ABC):
    """Sequence of samples in a global order, which is a pure function of the constructor arguments.

    Training reads an endless stream, or a finite one once. Evaluation reads a finite stream, or a given number of
    samples. Every rank must create an equal stream. A stream that transforms another one, such as packing, takes it as
    a constructor argument.

    Attributes:
        is_endless: False if the stream ends.
    """

    is_endless: bool = True

    @abstractmethod
    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor that starts at the beginning, or at `state`.

        `state` is the `Cursor.state_dict` of an equal stream, possibly in another process.
        """

    @abstractmethod
    def read(self, entry: Entry) -> Any:
        """Read the sample of an entry: any pytree that the collate function accepts. May run in a worker process."""

    @abstractmethod
    def length(self, entry: Entry) -> int:
        """Return the sample length in tokens, which packing and bucketing use."""

    def count(self) -> int:
        """Return the number of samples of a finite stream, without reading them. The default plans the whole stream."""
        assert not self.is_endless, "an endless stream has no number of samples"
        cursor, total = self.cursor(), 0
        while entries := cursor.take(4096):
            total += len(entries)
        return total

    def num_batches(self, size: int, state: JsonValue = None) -> int:
        """Return the number of batches of up to `size` samples after `state`, without reading them.

        The last batch of each epoch may be smaller. The default plans the whole stream, which must be finite.
        """
        assert not self.is_endless, "an endless stream has no number of batches"
        cursor, total = self.cursor(state), 0
        while cursor.take(size):
            total += 1
        return total

    @abstractmethod
    def identity(self) -> JsonValue:
        """Return everything that determines the order, as JSON. Resuming with another identity is an error."""
