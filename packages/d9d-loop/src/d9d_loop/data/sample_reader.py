"""Reads the samples of a batch and makes the batch; whatever goes wrong names the sample."""

from dataclasses import dataclass
from typing import Any, Protocol, final

from d9d_loop.batches import Collate
from d9d_loop.data.data_error import DataError
from d9d_loop.data.sample_stream import Entry, SampleStream

_LONGEST = 120


@final
@dataclass(frozen=True, slots=True)
class ReadJob:
    """A batch to be read.

    Attributes:
        position: Position of its first sample in the global order.
        entries: Its samples, which are consecutive.
    """

    position: int
    entries: list[Entry]

    def describe(self, number: int) -> str:
        """Names a sample of the batch, for people."""
        entry = repr(self.entries[number])
        entry = entry if len(entry) <= _LONGEST else f"{entry[:_LONGEST]}..."
        return f"sample {entry} (position {self.position + number} of the global order)"


class OnSample(Protocol):
    """Is told which sample of a batch is about to be read."""

    def __call__(self, number: int, /) -> None:
        """Told its number within the batch."""
        ...


@final
class SampleReader:
    """Reads batches, in this process or a worker.

    Args:
        stream: The samples.
        collate: Makes a batch of samples.
    """

    def __init__(self, stream: SampleStream, collate: Collate) -> None:
        self._stream, self._collate = stream, collate

    def __call__(self, job: ReadJob, on_sample: OnSample = lambda _number: None) -> Any:
        """Read a batch.

        Raises:
            DataError: From what a sample or the collate function raised.
        """
        samples: list[Any] = []
        for number, entry in enumerate(job.entries):
            on_sample(number)
            try:
                samples.append(self._stream.read(entry))
            except Exception as error:
                raise DataError(f"{job.describe(number)} could not be read: {_describe(error)}") from error
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"the {len(samples)} samples from {job.describe(0)} on could not be made a batch: {_describe(error)}"
            ) from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
