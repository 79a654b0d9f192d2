"""One pass over a finite stream, such as held-out data: the batches of each data-parallel rank."""

from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.contents import contents_of
from d9d_loop.data.indexed_stream import OrderCursor, measured_length
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_reader import ReadJob
from d9d_loop.data.sample_stream import Cursor, Samples, SampleStream, take_entries

_EMPTY = "the evaluation data are empty; expected at least one sample. Check the path of the data."


def check_evaluation_data(data: Samples | SampleStream, *, num_samples: int | None) -> None:
    """Raise `UserError` if a dataset is empty, or a stream is endless and `num_samples` is None. Reads no samples."""
    if not isinstance(data, SampleStream):
        if len(data) == 0:
            raise UserError(_EMPTY)
    elif data.is_endless and num_samples is None:
        raise UserError(
            "the evaluation data are an endless stream; expected a finite one, or a number of samples. Pass epochs=1 "
            "to the stream that reads them, or set evaluation.num_samples."
        )


@final
class SubsetStream(SampleStream):
    """Finite stream of a map-style dataset, or of a pseudorandom subset of it, in order. An entry is a sample index.

    The subset depends only on the two numbers of samples. A regular order of the data, such as alternating classes, has
    no effect on it.

    Args:
        num_samples: Number of samples, capped at the dataset size; None for the whole dataset.
    """

    is_endless = False

    def __init__(self, samples: Samples, num_samples: int | None = None) -> None:
        self._samples, size = samples, len(samples)
        is_whole = num_samples is None or num_samples >= size
        self._indices = range(size) if is_whole else sorted(SampleOrder(size, seed=0).take(0, num_samples))

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor at `state`, by default at the beginning, in O(1)."""
        return OrderCursor(lambda start, stop: list(self._indices[start:stop]), state, end=len(self._indices))

    def read(self, entry: int) -> Any:
        """Read the sample at an index."""
        return self._samples[entry]

    def length(self, entry: int) -> int:
        """Return the length of the sample at an index."""
        return measured_length(self._samples[entry])

    def identity(self) -> JsonValue:
        """Return the sizes of the dataset and of the stream, and the contents of the dataset."""
        return {"subset": [len(self._indices), len(self._samples)], "contents": contents_of(self._samples)}


def plan_pass(
    stream: SampleStream, *, batch_size: int, dp_rank: int, dp_size: int, num_samples: int | None = None
) -> tuple[list[ReadJob], int]:
    """Plan one pass over a stream; return this rank's batches, and how many of them are not padding.

    No collectives: every rank plans the whole pass. Every rank gets the same number of batches, because all ranks take
    part in the collectives of each batch. A rank with fewer samples ends with a padding batch of the first sample,
    whose outputs must be ignored. The last batch may have fewer than `batch_size` samples. Without `num_samples`, the
    stream must be finite. An empty stream raises `UserError`.
    """
    cursor, position, jobs, num_real = stream.cursor(), 0, list[ReadJob](), 0
    padding: ReadJob | None = None
    start, most = dp_rank * batch_size, batch_size * dp_size
    while entries := take_entries(cursor, most if num_samples is None else min(most, num_samples - position)):
        padding = padding or ReadJob(0, entries[:1])
        own = entries[start : start + batch_size]
        jobs.append(ReadJob(position + start, own) if own else padding)
        num_real += bool(own)
        position += len(entries)
    if padding is None:
        raise UserError(_EMPTY)
    return jobs, num_real
