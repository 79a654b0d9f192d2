"""What training data are to a job: one global order of samples, followed by every rank, each reading only its own.

A stream is planned and read apart. Every rank plans all of it, which is cheap: entries say which sample comes next. A
rank reads only the entries that fall to it, in worker processes if there are any. So the state of a stream is one for
the whole job, equal on every rank, and a job that resumes on any other number of ranks goes on right after the last
sample that was seen: there is nothing to be divided anew.
"""

from abc import ABC, abstractmethod
from typing import Any

from pydantic import JsonValue

Entry = Any
"""Says which sample is meant: small, cheap to make, and understood by the stream that it comes from."""


class Cursor(ABC):
    """A place in a stream, which moves on as entries are taken."""

    @abstractmethod
    def take(self, num_entries: int) -> list[Entry]:
        """The next entries; a stream has no end, so there are always enough."""

    @abstractmethod
    def state_dict(self) -> JsonValue:
        """The place right after the last entry that was taken, for `SampleStream.cursor`; it does not grow."""


class SampleStream(ABC):
    """Samples in an endless global order: a pure function of what the stream was made from.

    Every rank has to be given an equal stream. Streams that other streams are made from, as by packing, are among their
    constructor's arguments.
    """

    @abstractmethod
    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream.

        Args:
            state: What `Cursor.state_dict` of this stream returned, in this process or another one; `None` for the
                beginning.
        """

    @abstractmethod
    def read(self, entry: Entry) -> Any:
        """The sample of an entry: any pytree that the collate function takes. May run in a worker process."""

    @abstractmethod
    def length(self, entry: Entry) -> int:
        """How long the sample of an entry is, in tokens; what packing and bucketing go by."""

    @abstractmethod
    def identity(self) -> JsonValue:
        """What the order follows from. A job that resumes with another one would lose samples, or see some twice."""
