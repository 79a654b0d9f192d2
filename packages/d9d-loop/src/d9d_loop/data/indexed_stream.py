"""Any map-style dataset as a stream: shuffled anew in each epoch, at no cost of memory or start-up."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.batches import Samples
from d9d_loop.data.sample_stream import Cursor, SampleStream
from d9d_loop.sample_order import SampleOrder

_MOST_AHEAD = 4096
"""Positions that are looked up together, which is what makes them cheap; a cursor begins with fewer."""


@final
class IndexedStream(SampleStream):
    """The samples of a dataset in the order of `SampleOrder`, one epoch after the other. An entry is a sample's index.

    Args:
        samples: Read by index: a `torch.utils.data.Dataset`, a Hugging Face dataset, a list, anything alike.
        seed: Chooses the order of each epoch.
        shuffle: Whether to have another order than that of the data.
        length: Length of the sample at an index; by default the sample, which must be a tensor or a list then, is read
            and measured.

    Raises:
        UserError: If there are no samples.
    """

    def __init__(
        self, samples: Samples, *, seed: int, shuffle: bool = True, length: Callable[[int], int] | None = None
    ) -> None:
        self._samples, self._length = samples, length
        self._order = SampleOrder(len(samples), seed=seed, shuffle=shuffle)
        self._identity: dict[str, JsonValue] = {"samples": len(samples), "seed": seed, "shuffle": shuffle}

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream; made at once, wherever it is."""
        return OrderCursor(self._order, state)

    def read(self, entry: int) -> Any:
        """The sample at an index."""
        return self._samples[entry]

    def length(self, entry: int) -> int:
        """Length of the sample at an index."""
        if self._length is not None:
            return self._length(entry)
        return measured_length(self._samples[entry])

    def identity(self) -> JsonValue:
        """Number of samples, seed, and whether they are shuffled."""
        return {"indexed": self._identity}


def measured_length(sample: Any) -> int:
    """The length of a sample that is a sequence itself.

    Raises:
        UserError: If it is none: the number of keys of a dictionary is not its length.
    """
    if isinstance(sample, list | tuple | str | bytes) or (isinstance(sample, Tensor) and sample.dim()):
        return len(sample)
    raise UserError(
        f"a sample is of the type {type(sample).__name__}, whose length is not known; expected a tensor or a list, or "
        "a function that tells. Pass length=... to the stream that the samples come from."
    )


@dataclass(frozen=True, slots=True)
class _Place:
    position: int = 0


_PLACE = TypeAdapter(_Place)


@final
class OrderCursor(Cursor):
    """A place in a sample order; its entries are indices.

    Args:
        order: The order.
        state: What `state_dict` returned; `None` for the beginning.
    """

    def __init__(self, order: SampleOrder, state: JsonValue = None) -> None:
        self._order = order
        self._position = _Place().position if state is None else _PLACE.validate_python(state).position
        self._ahead: list[int] = []
        self._used = 0

    @property
    def position(self) -> int:
        """How many entries of the stream come before this place."""
        return self._position

    def take(self, num_entries: int) -> list[int]:
        """The next indices."""
        missing = num_entries - (len(self._ahead) - self._used)
        if missing > 0:
            start = self._position + len(self._ahead) - self._used
            num_ahead = max(missing, min(2 * len(self._ahead), _MOST_AHEAD))
            self._ahead = self._ahead[self._used :] + self._order.take(start, start + num_ahead)
            self._used = 0
        taken = self._ahead[self._used : self._used + num_entries]
        self._used += num_entries
        self._position += num_entries
        return taken

    def state_dict(self) -> JsonValue:
        """The position in the stream."""
        return asdict(_Place(self._position))
