"""Token files as map-style datasets of rows: consecutive windows, or all documents packed at once; for evaluation."""

from typing import final

from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.best_fit import best_fit_decreasing
from d9d_loop.data.document_stream import cut
from d9d_loop.data.packed_stream import pack_row
from d9d_loop.data.token_file import TokenFile


@final
class TokenWindows:
    """Consecutive windows of all tokens, across documents: `input_ids` and `labels`, int64 [L].

    A window begins with the last label of the one before it, so each token but the first is a label once; up to L
    tokens at the end are left out.

    Args:
        file: The token file.
        length: Positions of a window, L.

    Raises:
        UserError: If there are not enough tokens for one window.
    """

    def __init__(self, file: TokenFile, *, length: int) -> None:
        if not 1 <= length < file.manifest.num_tokens:
            raise UserError(
                f"length = {length} of {file.manifest.num_tokens} tokens; expected 1 to one fewer than there are."
            )
        self._file, self._length = file, length

    def __len__(self) -> int:
        """Number of windows."""
        return (self._file.manifest.num_tokens - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A window."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        tokens = self._file.tokens(index * self._length, (index + 1) * self._length + 1)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


@final
class PackedSamples:
    """All documents of a token file, packed at once; rows as `PackedStream` makes them.

    Looks at the length of every document, so it is for data of up to some millions of them.

    Args:
        file: The token file.
        row_length: Positions of a row.
        pad_token: The token of padding.

    Raises:
        UserError: If a row is empty, or no document has two tokens.
    """

    def __init__(self, file: TokenFile, *, row_length: int, pad_token: int = 0) -> None:
        if row_length < 1:
            raise UserError(f"row_length = {row_length}; expected at least 1.")
        parts: list[tuple[int, int]] = []
        for document in range(len(file)):
            start, stop = file.bounds(document)
            parts += [(start + first, start + last) for first, last in cut(stop - start, row_length)]
        if not parts:
            raise UserError("no document has two tokens, so there is nothing to predict; check how they were written.")
        rows = best_fit_decreasing([last - first for first, last in parts], row_length)
        self._rows = [[parts[item] for item in row] for row in rows]
        self._file, self._row_length, self._pad_token = file, row_length, pad_token

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A row."""
        return pack_row(
            [{"tokens": self._file.tokens(first, last + 1)} for first, last in self._rows[index]],
            self._row_length,
            pad_token=self._pad_token,
        )
