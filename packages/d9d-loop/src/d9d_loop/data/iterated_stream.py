"""Stream over an iterable dataset, such as a streamed Hugging Face dataset."""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import cached_property
from itertools import islice
from typing import Any, Protocol, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.data.contents import first_digest
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
        name: Identifies the data, of which only the first elements are compared. Resuming with another name is an
            error.
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
        return _IteratedCursor(self, state)

    def epoch(self, number: int) -> StatefulIterable:
        """Return the data of an epoch. Data without a state that can be saved raise `UserError`.

        The result is a shallow copy: a loaded state stays in a `datasets.IterableDataset`, and the function may return
        the same one for each epoch.
        """
        data = copy(self._epoch(number))
        if not (hasattr(data, "state_dict") and hasattr(data, "load_state_dict")):
            raise UserError(
                f"the data {self._name!r} of epoch {number} are a {type(data).__name__}; expected an iterable with the "
                "methods state_dict() and load_state_dict(state), such as a datasets.IterableDataset, so that a job "
                "resumes at the next element. Add the methods, or pass list(...) as data= if it fits into memory."
            )
        return data

    def read(self, entry: Any) -> Any:
        """Return the element, transformed if there is a `transform`."""
        return entry if self._transform is None else self._transform(entry)

    def length(self, entry: Any) -> int:
        """Return the length of an element, before `transform`."""
        return self._length(entry)

    def identity(self) -> JsonValue:
        """Return the name of the data, and the digest of their first four elements, transformed."""
        return {"iterated": self._name, "first": self._first}

    @cached_property
    def _first(self) -> str:
        return first_digest(self)


@final
class _IteratedCursor(Cursor):
    def __init__(self, stream: IteratedStream, state: Any) -> None:
        self._stream, self._num_epochs = stream, stream._num_epochs
        # An iterable may not report the loaded state before its first element, so `_loaded` keeps it.
        self._epoch, self._loaded = (0, None) if state is None else (state["epoch"], state["data"])
        self._data = stream.epoch(self._epoch)
        self._is_new = self._loaded is None
        if self._loaded is not None:
            self._data.load_state_dict(deepcopy(self._loaded))
        self._elements = iter(self._data)

    def take(self, num_entries: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < num_entries:
            taken += self._next_of_epoch(num_entries - len(taken))
            ends = bool(taken) and self._num_epochs is not None  # a batch of finite data has elements of one epoch
            if len(taken) == num_entries or ends or not self._start_epoch():
                break
        return taken

    def state_dict(self) -> JsonValue:
        is_moved = not self._is_new and self._loaded is None
        # A copy, because an iterable may return a dict that it changes later.
        return {"epoch": self._epoch, "data": deepcopy(self._data.state_dict() if is_moved else self._loaded)}

    def _next_of_epoch(self, num_entries: int) -> list[Any]:
        taken = list(islice(self._elements, num_entries))
        if taken:
            self._is_new, self._loaded = False, None
        return taken

    def _start_epoch(self) -> bool:
        """Start the next epoch. Return False if there is none."""
        if self._num_epochs is not None and self._epoch + 1 >= self._num_epochs:
            return False
        if self._is_new:
            raise UserError(
                f"epoch {self._epoch} of the data {self._stream._name!r} has no elements; expected at least one. "
                "Check the source of the data."
            )
        self._epoch, self._is_new, self._loaded = self._epoch + 1, True, None
        self._data = self._stream.epoch(self._epoch)
        self._elements = iter(self._data)
        return True
