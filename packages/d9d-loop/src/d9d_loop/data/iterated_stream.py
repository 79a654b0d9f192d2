"""Stream over an iterable dataset, such as a streamed Hugging Face dataset."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol, final

from pydantic import JsonValue, TypeAdapter

from d9d_dist import UserError
from d9d_loop.data.indexed_stream import end_of_epochs, measured_length
from d9d_loop.data.sample_stream import Cursor, SampleStream


class StatefulIterable(Protocol):
    """Iterable whose last iterator can be saved and restored, such as `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the data, from the loaded state if one was loaded."""
        ...

    def state_dict(self) -> Any:
        """Return the position of the last iterator, as a JSON value."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Make the next iterator continue from `state`."""
        ...


@final
class IteratedStream(SampleStream):
    """Stream over an iterable dataset, epoch by epoch. An entry is an element of the iterable, before `transform`.

    Every rank iterates over all data, but applies `transform` only to its own samples, so expensive work belongs in
    `transform`. Shuffle with `ShuffledStream`: the shuffle buffer of an iterable is lost when a job resumes.

    Args:
        epoch: Function that returns the data of an epoch, counted from 0, such as
            `lambda epoch: load_dataset(..., streaming=True)`.
        name: Identifies the data, whose contents are not compared. Resuming with another name is an error.
        length: Function that returns the length of an element before `transform`; by default `len` of a tensor or a
            sequence.
        epochs: Number of epochs; None repeats them without end.

    Raises:
        UserError: If `epochs` is below 1.
    """

    def __init__(
        self,
        epoch: Callable[[int], StatefulIterable],
        *,
        name: str,
        transform: Callable[[Any], Any] | None = None,
        length: Callable[[Any], int] = measured_length,
        epochs: int | None = None,
    ) -> None:
        self._num_epochs, self.is_endless = end_of_epochs(epochs, 1), epochs is None
        self._epoch, self._name, self._transform, self._length = epoch, name, transform, length

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor; its position is the epoch and the state of the iterable."""
        return _IteratedCursor(self._epoch, state, name=self._name, num_epochs=self._num_epochs)

    def read(self, entry: Any) -> Any:
        """Return the element, transformed if there is a `transform`."""
        return entry if self._transform is None else self._transform(entry)

    def length(self, entry: Any) -> int:
        """Return the length of an element, before `transform`."""
        return self._length(entry)

    def identity(self) -> JsonValue:
        """Return the name of the data."""
        return {"iterated": self._name}


@dataclass(frozen=True, slots=True)
class _Place:
    epoch: int = 0
    data: JsonValue = None


_PLACE = TypeAdapter(_Place)


@final
class _IteratedCursor(Cursor):
    def __init__(
        self, epoch: Callable[[int], StatefulIterable], state: JsonValue, *, name: str, num_epochs: int | None
    ) -> None:
        place = _Place() if state is None else _PLACE.validate_python(state)
        self._open, self._name, self._num_epochs = epoch, name, num_epochs
        self._epoch = place.epoch
        self._data = epoch(place.epoch)
        self._is_new = place.data is None
        self._loaded = place.data  # an iterable may not report the loaded state before its first element
        if place.data is not None:
            self._data.load_state_dict(place.data)
        self._elements = iter(self._data)

    def take(self, num_entries: int) -> list[Any]:
        return list(islice(self._entries(), num_entries))

    def state_dict(self) -> JsonValue:
        if self._is_new or self._loaded is not None:
            return asdict(_Place(self._epoch, self._loaded))
        return asdict(_Place(self._epoch, self._data.state_dict()))

    def _entries(self) -> Iterator[Any]:
        while True:
            for element in self._elements:
                self._is_new, self._loaded = False, None
                yield element
            if self._num_epochs is not None and self._epoch + 1 >= self._num_epochs:
                return
            if self._is_new:
                raise UserError(
                    f"epoch {self._epoch} of the data {self._name!r} has no elements; expected at least one. Check "
                    "the source of the data."
                )
            self._epoch, self._is_new, self._loaded = self._epoch + 1, True, None
            self._data = self._open(self._epoch)
            self._elements = iter(self._data)
