"""Interface of all data: one order of samples over all ranks, from which each rank reads only its own share.

Planning and reading are separate. Every rank plans the whole stream, which is cheap: a cursor returns small entries
that identify the next samples. A rank reads only its own entries, possibly in worker processes. The state of a stream
is therefore equal on every rank. A job resumes on any number of ranks, right after the last used sample.
"""

from abc import ABC, abstractmethod
from typing import Any

from pydantic import JsonValue

Entry = Any
"""Identifier of a sample for the stream that created the entry. Entries are small and cheap to create."""


class Cursor(ABC):
    """Current position in a stream; `take` advances it."""

    @abstractmethod
    def take(self, num_entries: int) -> list[Entry]:
        """Return the next `num_entries` entries; fewer only at the end of a finite stream."""

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

    @abstractmethod
    def identity(self) -> JsonValue:
        """Return everything that determines the order, as JSON. Resuming with another identity is an error."""
