"""Packs documents into rows of one length, with almost no padding, and marks where each document is.

B: rows, L: positions of a row.
"""

from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.best_fit import best_fit_decreasing
from d9d_loop.data.document_stream import Document
from d9d_loop.data.sample_stream import Cursor, Entry, SampleStream
from d9d_loop.data.shuffled_stream import shuffled
from d9d_loop.data.window_cursor import WindowCursor

IGNORED_LABEL = -100
"""The label of padding, as of `torch.nn.functional.cross_entropy`."""


@final
class PackedStream(SampleStream):
    """Rows into which the documents of a window are packed by best-fit decreasing; then the rows are shuffled.

    The rows of a window are a function of where it begins, so all ranks pack alike, and each reads only its rows. All
    rows are almost full: ranks with equally many rows have equally many tokens. A sample is a dictionary of int64 [L]:

    - `input_ids`, and `labels`: the token after each one. No label crosses into another document, and none is lost.
    - `documents`: the number of each position's document within its row; padding is a document of its own. For the
      `documents_BL` of a model, which keeps attention within a document.
    - `position_ids`: positions within the document.
    - `sources`, of the documents of a mixture: number of the source of each position; -1 for padding.

    Args:
        documents: Streams documents: a `DocumentStream`, a `TokenizedStream`, or a mixture of such.
        row_length: Positions of a row, L.
        window: Documents that are packed together; the more there are, the less is padding. 16,384 leave about 0.05 %.
        seed: Chooses the order of the rows of a window.
        pad_token: The token of padding.

    Raises:
        UserError: If a row or a window is empty; on taking, if a document does not fit into a row.
    """

    def __init__(
        self, documents: SampleStream, *, row_length: int, window: int = 16_384, seed: int, pad_token: int = 0
    ) -> None:
        for name, value in (("row_length", row_length), ("window", window)):
            if value < 1:
                raise UserError(f"{name} = {value}; expected at least 1.")
        self._documents, self._row_length, self._window = documents, row_length, window
        self._seed, self._pad_token = seed, pad_token

    def cursor(self, state: JsonValue = None) -> Cursor:
        """A place in the stream; one inside of a window packs it again."""
        return WindowCursor(self._documents, state, size=self._window, arrange=self._arrange)

    def read(self, entry: tuple[Entry, ...]) -> dict[str, Tensor]:
        """A row."""
        return pack_row([self._documents.read(part) for part in entry], self._row_length, pad_token=self._pad_token)

    def length(self, entry: tuple[Entry, ...]) -> int:
        """Positions of a row that are no padding."""
        return sum(map(self._documents.length, entry))

    def identity(self) -> JsonValue:
        """Sizes, seed, and what is packed."""
        sizes = {"row_length": self._row_length, "window": self._window}
        return {"packed": {**sizes, "seed": self._seed, "of": self._documents.identity()}}

    def _arrange(self, entries: list[Entry], window: int) -> list[Entry]:
        lengths = [self._documents.length(entry) for entry in entries]
        if max(lengths) > self._row_length:
            raise UserError(
                f"a document of length {max(lengths)} does not fit into a row of length {self._row_length}; expected "
                "none longer. Give the documents max_length = row_length, which cuts them without losing a token."
            )
        rows = best_fit_decreasing(lengths, self._row_length)
        packed = [tuple([entries[item] for item in row]) for row in rows]
        return shuffled(packed, seed=self._seed, purpose="packed window", window=window)


def pack_row(documents: list[Document], row_length: int, *, pad_token: int = 0) -> dict[str, Tensor]:
    """Lay documents into a row, one after the other, and pad what is left; see `PackedStream`.

    Args:
        documents: Each with `tokens`, int64 [n + 1], of which n become inputs and n labels.
        row_length: Positions of the row, L; at least the sum of all n.
        pad_token: The token of padding.
    """
    row: dict[str, Any] = {
        "input_ids": torch.full((row_length,), pad_token),
        "labels": torch.full((row_length,), IGNORED_LABEL),
        "documents": torch.full((row_length,), len(documents)),
        "position_ids": torch.zeros(row_length, dtype=torch.int64),
    }
    if any("source" in document for document in documents):
        row["sources"] = torch.full((row_length,), -1)
    start = 0
    for number, document in enumerate(documents):
        tokens = document["tokens"]
        place = slice(start, start + len(tokens) - 1)
        row["input_ids"][place], row["labels"][place] = tokens[:-1], tokens[1:]
        row["documents"][place] = number
        row["position_ids"][place] = torch.arange(len(tokens) - 1)
        if "source" in document:
            row["sources"][place] = document["source"]
        start = place.stop
    assert start <= row_length
    return row
