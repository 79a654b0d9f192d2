"""Streams of documents, from a token file or tokenized on the fly. Long documents are split without losing tokens."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.contents import first_digest
from d9d_loop.data.document import Document, cut
from d9d_loop.data.indexed_stream import OrderCursor, end_of_epochs
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.stored_tokens import TokenDocuments
from d9d_loop.data.windowed_stream import WindowedStream

_MOST_AHEAD = 64
"""Largest number of documents whose parts are computed in one batch."""


@final
class DocumentStream(SampleStream):
    """Stream over the documents of a token file, or of `open_tokens`, epoch by epoch.

    An entry is (document, first token, last token), both tokens inclusive; only these tokens are read.

    Args:
        max_length: Longer documents are split into parts of at most this many positions. For packing, the row length.
        shuffle: If False, read each epoch in the order of the file.
        epochs: Number of epochs; None repeats them without end.

    Raises:
        UserError: If `max_length` or `epochs` is below 1, the file stores no document boundaries, or
            every document has fewer than two tokens.
    """

    def __init__(
        self, file: TokenDocuments, *, max_length: int, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        _check_max_length(max_length)
        if not file.has_documents:
            raise UserError(
                "the file has no document boundaries, so its documents cannot be packed; expected a format that has "
                "them. Read windows across documents: TokenWindows, or dataset.packing = false."
            )
        if all(stop - start < 2 for start, stop in map(file.bounds, range(len(file)))):
            raise UserError(
                f"all {len(file)} documents have fewer than two tokens, so there is nothing to predict; expected "
                "longer documents. Check how the token file was written."
            )
        self._file, self._max_length = file, max_length
        self._order = SampleOrder(len(file), seed=seed, shuffle=shuffle)
        self._end, self.is_endless = end_of_epochs(epochs, len(file)), epochs is None
        self._identity: dict[str, JsonValue] = {
            "contents": file.contents_digest(),
            "max_length": max_length,
            "seed": seed,
            "shuffle": shuffle,
        }

    def cursor(self, state: JsonValue = None) -> Cursor:
        """Return a cursor at `state`, by default at the beginning, in O(1)."""
        return _DocumentCursor(self, state)

    def read(self, entry: tuple[int, int, int]) -> Document:
        """Return the tokens of a part of a document, and their mask if the file has masks."""
        document, first, last = entry
        start, _ = self._file.bounds(document)
        return self._file.part(start + first, start + last + 1)

    def length(self, entry: tuple[int, int, int]) -> int:
        """Return the number of positions of a part: its number of tokens minus one."""
        _, first, last = entry
        return last - first

    def identity(self) -> JsonValue:
        """Return the digests of the tokens and masks, the maximum length, the seed, and the `shuffle` flag."""
        return {"documents": self._identity}


@final
class _DocumentCursor(Cursor):
    def __init__(self, stream: DocumentStream, state: Any) -> None:
        document, part = (0, 0) if state is None else (state["document"], state["part"])
        self._file, self._max_length = stream._file, stream._max_length
        order = stream._order.take
        self._order = OrderCursor(order, {"position": document}, end=stream._end, epoch=len(stream._file))
        self._ahead: list[tuple[int, tuple[int, int, int]]] = []  # (position of the document, entry) of each part
        if part:
            self._look_ahead(1)
            self._ahead = self._ahead[part:]

    @property
    def is_at_epoch_end(self) -> bool:
        """True if the next entry starts an epoch of a finite stream."""
        return not self._ahead and self._order.is_at_epoch_end

    def take(self, num_entries: int) -> list[tuple[int, int, int]]:
        while (missing := num_entries - len(self._ahead)) > 0:
            if (self._ahead and self._order.is_at_epoch_end) or not self._look_ahead(min(missing, _MOST_AHEAD)):
                break
        taken, self._ahead = self._ahead[:num_entries], self._ahead[num_entries:]
        return [part for _, part in taken]

    def state_dict(self) -> JsonValue:
        """Return the position of the next part's document, and the index of the part in it."""
        if not self._ahead:
            return {"document": self._order.position, "part": 0}
        position, (_, first, _) = self._ahead[0]
        return {"document": position, "part": first // self._max_length}

    def _look_ahead(self, num_documents: int) -> bool:
        """Append the parts of the next documents to the look-ahead queue. Return False at the end of the documents."""
        position = self._order.position
        documents = self._order.take(num_documents)
        for document in documents:
            start, stop = self._file.bounds(document)
            parts = cut(stop - start, self._max_length)
            self._ahead += [(position, (document, first, last)) for first, last in parts]
            position += 1
        return bool(documents)


@final
class TokenizedStream(WindowedStream):
    """Documents that are tokenized on the fly. An entry is the tokens of a part.

    Every rank tokenizes every sample, since the lengths determine the order of the parts. If that is too slow, write a
    token file once.

    Args:
        tokenize: Function that returns the tokens of a sample as integers, with an end token if one is wanted.
        max_length: Longer documents are split into parts of at most this many positions. For packing, the row length.
        name: Identifies `tokenize`, of which only the tokens of the first samples are compared. Resuming with another
            name is an error.
        window: Number of samples tokenized at a time. A job that resumes inside a window tokenizes the window again.

    Raises:
        UserError: If `max_length` or `window` is below 1.
    """

    def __init__(
        self,
        stream: SampleStream,
        tokenize: Callable[[Any], Sequence[int] | Tensor],
        *,
        max_length: int,
        name: str = "",
        window: int = 64,
    ) -> None:
        _check_max_length(max_length)
        if window < 1:
            raise UserError(f"window = {window}; expected at least 1 sample to tokenize at a time.")
        super().__init__(stream, size=window)
        self._tokenize, self._max_length, self._name = tokenize, max_length, name

    def read(self, entry: list[int]) -> Document:
        """Return the tokens of a part of a document."""
        return {"tokens": torch.tensor(entry)}

    def length(self, entry: list[int]) -> int:
        """Return the number of positions of a part: its number of tokens minus one."""
        return len(entry) - 1

    def identity(self) -> JsonValue:
        """Return the name, the sizes, the tokens of the first samples, and the identity of the tokenized stream."""
        sizes = {"max_length": self._max_length, "window": self._size}
        return {"tokenized": {"name": self._name, **sizes, "first": self._first, "of": self._stream.identity()}}

    @cached_property
    def _first(self) -> str:
        return first_digest(self._stream, self._tokenize)

    def _arrange(self, entries: list[Entry], window: int) -> list[list[int]]:
        parts: list[list[int]] = []
        for entry in entries:
            tokens = self._tokenize(self._stream.read(entry))
            values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
            parts += [values[first : last + 1] for first, last in cut(len(values), self._max_length)]
        return parts


def _check_max_length(max_length: int) -> None:
    if max_length < 1:
        raise UserError(f"max_length = {max_length}; expected at least 1 position.")
