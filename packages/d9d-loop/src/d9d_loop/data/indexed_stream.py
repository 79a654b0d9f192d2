"""Stream over a map-style dataset, shuffled in a new order each epoch. No permutation is stored or precomputed."""

from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, final

from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.contents import contents_of
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Cursor, Samples, SampleStream

_MOST_AHEAD = 4096
"""Limit on the number of sample indices computed ahead of use. The number starts lower and doubles."""


@final
class IndexedStream(SampleStream):
    """Stream over a map-style dataset, epoch by epoch, in the order of `SampleOrder`. An entry is a sample index.

    Args:
        samples: Map-style dataset, such as a `torch.utils.data.Dataset`, a Hugging Face dataset or a list.
        shuffle: If False, read each epoch in the order of the dataset.
        length: Function that returns the length of the sample at an index. The default reads the sample and applies
            `len`, which requires a tensor or a sequence.
        epochs: Number of epochs; None repeats them without end.
        subset: Number of samples of a pseudorandom subset to read, which depends only on the two numbers of samples: a
            regular order of the data, such as alternating classes, has no effect. None or a larger number reads all.

    Raises:
        UserError: If the dataset is empty, or `epochs` or `subset` is below 1.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        shuffle: bool = True,
        length: Callable[[int], int] | None = None,
        epochs: int | None = None,
        subset: int | None = None,
    ) -> None:
        self._samples, self._length, self._size, self._subset = samples, length, len(samples), None
        self._sizes: dict[str, JsonValue] = {"samples": len(samples), "seed": seed, "shuffle": shuffle}
        if subset is not None and subset < len(samples):
            if subset < 1:
                raise UserError(f"subset = {subset}; expected at least 1, or None for all samples.")
            self._size, self._subset = subset, sorted(SampleOrder(len(samples), seed=0).take(0, subset))
            self._sizes["subset"] = subset
        self._order = SampleOrder(self._size, seed=seed, shuffle=shuffle)
        self._end, self.is_endless = end_of_epochs(epochs, self._size), epochs is None

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor at `state`, by default at the beginning, in O(1)."""
        return OrderCursor(self._take, state, end=self._end, epoch=self._size)

    def num_batches(self, size: int, state: Any = None) -> int:
        """Return the number of batches, in constant time."""
        assert self._end is not None, "an endless stream has no number of batches"
        position = 0 if state is None else state["position"]
        left, epoch = max(self._end - position, 0), self._size
        return left // epoch * -(-epoch // size) + -(-(left % epoch) // size)

    def read(self, entry: int) -> Any:
        """Read the sample at an index."""
        return self._samples[entry]

    def length(self, entry: int) -> int:
        """Return the length of the sample at an index."""
        if self._length is not None:
            return self._length(entry)
        return measured_length(self._samples[entry])

    def identity(self) -> JsonValue:
        """Return the sizes of the dataset and the subset, the contents (see `contents_of`), the seed, and `shuffle`."""
        return {"indexed": {**self._sizes, "contents": self._contents}}

    def _take(self, start: int, stop: int) -> list[int]:
        taken = self._order.take(start, stop)
        return taken if self._subset is None else [self._subset[index] for index in taken]

    @cached_property
    def _contents(self) -> JsonValue:
        return contents_of(self._samples)


def held_out_stream(data: Samples | SampleStream, num_samples: int | None = None) -> SampleStream:
    """Return a finite stream of a dataset, or of a subset of it, in order; return a stream unchanged."""
    if isinstance(data, SampleStream):
        return data
    return IndexedStream(data, seed=0, shuffle=False, epochs=1, subset=num_samples)


def end_of_epochs(epochs: int | None, num_samples: int) -> int | None:
    """Return the position at which a stream of `epochs` epochs ends; None if it is endless."""
    if epochs is not None and epochs < 1:
        raise UserError(f"epochs = {epochs}; expected at least 1, or None for an endless stream.")
    return None if epochs is None else epochs * num_samples


def measured_length(sample: Any) -> int:
    """Return `len` of a list, tuple, string, bytes or tensor. Other types, such as dictionaries, raise `UserError`."""
    if isinstance(sample, list | tuple | str | bytes) or (isinstance(sample, Tensor) and sample.dim()):
        return len(sample)
    raise UserError(
        f"the length of a sample of type {type(sample).__name__} is unknown; expected a tensor or a list, or "
        "a function. Pass length=... to the stream that returns the samples."
    )


@final
class OrderCursor(Cursor):
    """Cursor over an order of samples, whose entries are sample indices.

    Args:
        take: Returns the sample indices at positions `start` to `stop - 1`.
        end: Position at which the order ends; `None` if it is endless.
        epoch: Length of an epoch, by default the whole order. Only used with `end`.
    """

    def __init__(
        self,
        take: Callable[[int, int], list[int]],
        state: Any = None,
        *,
        end: int | None = None,
        epoch: int | None = None,
    ) -> None:
        self._take, self._end, self._epoch = take, end, max(epoch or end or 0, 1)
        self.position: int = 0 if state is None else state["position"]
        """Number of entries taken so far."""
        self._ahead: deque[int] = deque()
        self._num_ahead = 0

    @property
    def is_at_epoch_end(self) -> bool:
        """True if the next entry starts an epoch of a finite order."""
        return self._end is not None and self.position % self._epoch == 0

    def take(self, num_entries: int) -> list[int]:
        """Return the next sample indices; of a finite order, those of one epoch."""
        if self._end is not None:
            left = self._epoch - self.position % self._epoch
            num_entries = max(min(num_entries, left, self._end - self.position), 0)
        missing = num_entries - len(self._ahead)
        if missing > 0:
            start = self.position + len(self._ahead)
            self._num_ahead = max(missing, min(2 * self._num_ahead, _MOST_AHEAD))
            self._ahead.extend(self._take(start, start + self._num_ahead))
        self.position += num_entries
        return [self._ahead.popleft() for _ in range(num_entries)]

    def state_dict(self) -> JsonValue:
        """Return the position in the stream."""
        return {"position": self.position}
