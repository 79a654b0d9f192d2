"""Packing of documents into rows of equal length with little padding, and windows of a token file.

L: row length, in positions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.document import Document, documents_of
from d9d_loop.data.sample_stream import Entry, SampleStream
from d9d_loop.data.shuffled_stream import shuffled
from d9d_loop.data.stored_tokens import TokenDocuments
from d9d_loop.data.windowed_stream import WindowedStream

IGNORED_LABEL = -100
"""Label of positions without a loss; the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


@final
class PackedStream(WindowedStream):
    """Stream of rows: each window of documents is packed by best-fit decreasing, and its rows are shuffled.

    The rows of a window are a function of its start: all ranks compute the same packing and read only their own rows.
    Almost all rows are full, so ranks with equally many rows have about equally many tokens. A sample is a dictionary
    of int64 [L]:

    - `input_ids`.
    - `labels`: the next token of each position, or -100 for positions without a loss. No label is taken from another
      document, and no label is lost.
    - `documents`: index of each position's document within its row; padding counts as one more document. It is the
      `document_ids_BL` argument of models, which restricts attention to a document.
    - `position_ids`: position within the document.
    - `sources`: index of each position's source, -1 for padding. Only if the documents come from a mixture.
    - `margins`: margin of the pair of each position, 0 for padding, float32. Only of a `PairStream` for reward models.

    Args:
        documents: Stream of documents: a `DocumentStream`, `TokenizedStream` or `ChatStream`; of pairs: a `PairStream`;
            or a mixture of these.
        window: Number of documents packed together. Larger windows leave less padding: 16,384 leave about 0.05 %.
        pack: Function that returns the sample of the documents of a row. The default is `pack_row`.

    Raises:
        UserError: If `row_length` or `window` is below 1; in `Cursor.take`, if a document is longer than a row.
    """

    def __init__(
        self,
        documents: SampleStream,
        *,
        row_length: int,
        window: int = 16_384,
        seed: int,
        pad_token: int = 0,
        pack: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        for name, value in (("row_length", row_length), ("window", window)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        super().__init__(documents, size=window)
        self._row_length, self._seed = row_length, seed
        self._pack = pack or partial(pack_row, row_length=row_length, pad_token=pad_token)

    def read(self, entry: tuple[Entry, ...]) -> Any:
        """Read the documents of a row and pack them."""
        documents = [document for part in entry for document in documents_of(self._stream.read(part))]
        return self._pack(documents)

    def length(self, entry: tuple[Entry, ...]) -> int:
        """Return the number of positions of a row, excluding padding."""
        return sum(map(self._stream.length, entry))

    def identity(self) -> JsonValue:
        """Return the row length, the window, the seed, and the identity of the documents."""
        sizes = {"row_length": self._row_length, "window": self._size}
        return {"packed": {**sizes, "seed": self._seed, "of": self._stream.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        lengths = [self._stream.length(entry) for entry in entries]
        if max(lengths) > self._row_length:
            raise UserError(
                f"a document of length {max(lengths)} does not fit into a row of length {self._row_length}; expected "
                "shorter documents. Set max_length = row_length for the documents, which splits them without losing a "
                "token."
            )
        rows = best_fit_decreasing(lengths, self._row_length)
        packed = [tuple([entries[item] for item in row]) for row in rows]
        return shuffled(packed, seed=self._seed, purpose="packed window", window=window)


def pack_row(documents: list[Document], row_length: int, *, pad_token: int = 0) -> dict[str, Tensor]:
    """Concatenate documents into a row, pad the remaining positions, and return a sample as in `PackedStream`.

    `row_length` is at least the sum of the numbers of positions of the documents; see `shifted`.
    """
    row: dict[str, Any] = {
        "input_ids": torch.full((row_length,), pad_token),
        "labels": torch.full((row_length,), IGNORED_LABEL),
        "documents": torch.full((row_length,), len(documents)),
        "position_ids": torch.zeros(row_length, dtype=torch.int64),
    }
    if any("source" in document for document in documents):
        row["sources"] = torch.full((row_length,), -1)
    if any("margin" in document for document in documents):
        row["margins"] = torch.zeros(row_length)
    start = 0
    for number, document in enumerate(documents):
        num_positions = len(document["tokens"]) - 1
        place = slice(start, start + num_positions)
        for name, values in shifted(document).items():
            row[name][place] = values
        row["documents"][place] = number
        row["position_ids"][place] = torch.arange(num_positions)
        if "source" in document:
            row["sources"][place] = document["source"]
        if "margin" in document:
            row["margins"][place] = document["margin"]
        start = place.stop
    assert start <= row_length
    return row


def shifted(document: Document) -> dict[str, Tensor]:
    """Return the `input_ids` and `labels` of a document of n + 1 tokens: int64 [n], the first and the last n tokens.

    Labels outside of the mask are -100.
    """
    tokens = document["tokens"]
    labels = tokens[1:].masked_fill(~document["mask"][1:], IGNORED_LABEL) if "mask" in document else tokens[1:]
    return {"input_ids": tokens[:-1], "labels": labels}


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into rows by best-fit decreasing, and return the item indices of each row. Deterministic.

    Items are placed in descending order of length, each into the row with the least sufficient free space, or into a
    new row (Johnson: "Near-optimal bin packing algorithms", 1973; for documents: "Fewer Truncations Improve Language
    Modeling", arXiv:2404.10830). Rows with equal free space are interchangeable, and so are items of equal length. So a
    group of items is placed into a group of rows at once. The number of these placements depends mostly on the number
    of distinct lengths.
    """
    items_of: list[list[int]] = [[] for _ in range(capacity + 1)]  # by length
    for item, length in enumerate(lengths):
        items_of[length].append(item)
    rows: list[list[int]] = []
    rows_with: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # by free space
    rooms = 0  # bit set: bit r is set if a row has free space r
    assert not items_of[0]
    for length in range(capacity, 0, -1):
        items = items_of[length]
        while items:
            if large_enough := rooms >> length:
                room = length + (large_enough & -large_enough).bit_length() - 1
                candidates = rows_with[room]
            else:
                room, candidates = capacity, rows_with[capacity]
                candidates += ([] for _ in range(max(len(items) // (capacity // length), 1)))
                rows += candidates
                rooms |= 1 << capacity
            # A row that took an item remains the best fit for the next items of this length, until it is full.
            each = min(room // length, len(items))
            chosen = candidates[-(len(items) // each) :]
            for number, row in enumerate(chosen):
                row.extend(items[number * each : (number + 1) * each])
            del candidates[-len(chosen) :], items[: len(chosen) * each]
            if not candidates:
                rooms ^= 1 << room
            rows_with[room - each * length] += chosen
            rooms |= 1 << (room - each * length)
    return rows


@final
class TokenWindows:
    """Consecutive windows of all tokens, across documents. A sample has `input_ids` and `labels`, int64 [L].

    A window starts at the last label of the previous window, so each token but the first is a label exactly once. Fewer
    than L tokens at the end are dropped.

    Args:
        length: Window length L, in positions.

    Raises:
        UserError: If the token file is too short for one window, has loss masks, or stores each document apart, or
            `length` is below 1.
    """

    def __init__(self, file: TokenDocuments, *, length: int) -> None:
        if file.has_masks:
            raise UserError(
                "the token file has loss masks, which TokenWindows would ignore; read it with DocumentStream."
            )
        if file.num_tokens is None:
            raise UserError(
                "the format stores each document apart, so there are no windows across documents; expected documents "
                "that are packed. Read them with DocumentStream, or dataset.packing = true."
            )
        if not 1 <= length < file.num_tokens:
            raise UserError(
                f"length = {length}, and the file has {file.num_tokens} tokens; expected at least 1, and less "
                "than the number of tokens."
            )
        self._file, self._length, self._num_windows = file, length, (file.num_tokens - 1) // length

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range: there are {len(self)} windows")
        return shifted({"tokens": self._file.tokens(index * self._length, (index + 1) * self._length + 1)})

    def contents_digest(self) -> JsonValue:
        """Return the digests of the token file, and the length."""
        return [self._file.contents_digest(), self._length]
