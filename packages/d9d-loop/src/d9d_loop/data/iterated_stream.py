"""Data that can only be read in their own order, as a stream: a streamed Hugging Face dataset, or anything alike."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final

from pydantic import JsonValue, TypeAdapter

from d9d_dist import UserError
from d9d_loop.data.indexed_stream import measured_length
from d9d_loop.data.sample_stream import Cursor, SampleStream


class StatefulIterable(Protocol):
    """An iterable that knows how far the iterator it made last has come, as `datasets.IterableDataset` does."""

    def __iter__(self) -> Iterator[Any]:
        """Go through the data, from the place that was loaded if there is one."""
        ...

    def state_dict(self) -> Any:
        """How far the last iterator has come, as numbers, strings, lists and dictionaries of such."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Let the next iterator go on from there."""
        ...


@final
class IteratedStream(SampleStream):
    """One epoch after the other of data that are iterated over. An entry is what the iterator gave, before `transform`.

    Every rank iterates over all data, so that it can go on anywhere; only what a rank takes itself is transformed. So
    keep what is expensive out of the iterable and in `transform`. Shuffle with `ShuffledStream`: the shuffle buffer of
    an iterable is filled anew when a job resumes, and what was in it is lost.

    Args:
        epoch: Gives the data of an epoch, counted from 0; e.g. `lambda epoch: load_dataset(..., streaming=True)`.
        name: Names the data, which cannot be compared themselves: a job that resumes with another name is refused.
        transform: Makes a sample of what was iterated over.
        length: Length of an element before `transform`; by default it must be a tensor or a list itself.
    """

    def __init__(
        self,
        epoch: Callable[[int], StatefulIterable],
        *,
        name: str,
        transform: Callable[[Any], Any] | None = None,
        length: Callable[[Any], int] = measured_length,
    ) -> None:
        self._epoch, self._name, self._transform, self._length = epoch, name, transform, length

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream."""
        return _IteratedCursor(self._epoch, state, name=self._name)

    def read(self, entry: Any) -> Any:
        """The sample that is made of an element."""
        return entry if self._transform is None else self._transform(entry)

    def length(self, entry: Any) -> int:
        """Length of an element."""
        return self._length(entry)

    def identity(self) -> JsonValue:
        """The name of the data."""
        return {"iterated": self._name}


@dataclass(frozen=True, slots=True)
class _Place:
    epoch: int = 0
    data: JsonValue = None


_PLACE = TypeAdapter(_Place)


@final
class _IteratedCursor(Cursor):
    def __init__(self, epoch: Callable[[int], StatefulIterable], state: JsonValue, *, name: str) -> None:
        place = _Place() if state is None else _PLACE.validate_python(state)
        self._open, self._name = epoch, name
        self._epoch = place.epoch
        self._data = epoch(place.epoch)
        self._is_new = place.data is None
        self._loaded = place.data  # until an element is taken, data may not tell that they were moved
        if place.data is not None:
            self._data.load_state_dict(place.data)
        self._elements = iter(self._data)

    def take(self, num_entries: int) -> list[Any]:
        """The next elements."""
        return [self._next() for _ in range(num_entries)]

    def state_dict(self) -> JsonValue:
        """The epoch, and how far its data were iterated over."""
        if self._is_new or self._loaded is not None:
            return asdict(_Place(self._epoch, self._loaded))
        return asdict(_Place(self._epoch, self._data.state_dict()))

    def _next(self) -> Any:
        for element in self._elements:
            self._is_new, self._loaded = False, None
            return element
        if self._is_new:
            raise UserError(
                f"epoch {self._epoch} of the data {self._name!r} has no elements; expected at least one. Check where "
                "they are read from."
            )
        self._epoch, self._is_new, self._loaded = self._epoch + 1, True, None
        self._data = self._open(self._epoch)
        self._elements = iter(self._data)
        return self._next()
