"""Map-style datasets of rows from a token file, for evaluation: consecutive windows, or packed documents."""

from typing import final

from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.document import cut
from d9d_loop.data.packed_stream import best_fit_decreasing, pack_row
from d9d_loop.data.token_file import TokenFile


@final
class TokenWindows:
    """Consecutive windows of all tokens, across documents. A sample has `input_ids` and `labels`, int64 [L].

    A window starts at the last label of the previous window, so each token but the first is a label exactly once. Fewer
    than L tokens at the end are dropped.

    Args:
        length: Window length L, in positions.

    Raises:
        UserError: If the token file is too short for one window or has loss masks, or `length` is below 1.
    """

    def __init__(self, file: TokenFile, *, length: int) -> None:
        if file.has_masks:
            raise UserError("the token file has loss masks, which TokenWindows would ignore; use PackedSamples.")
        if not 1 <= length < file.manifest.num_tokens:
            raise UserError(
                f"length = {length}, and the file has {file.manifest.num_tokens} tokens; expected at least 1, and less "
                "than the number of tokens."
            )
        self._file, self._length = file, length

    def __len__(self) -> int:
        return (self._file.manifest.num_tokens - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range: there are {len(self)} windows")
        tokens = self._file.tokens(index * self._length, (index + 1) * self._length + 1)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


@final
class PackedSamples:
    """Packed rows of all documents of a token file. A sample is a row as in `PackedStream`.

    The constructor reads the length of every document, so it suits files of up to a few million documents.

    Raises:
        UserError: If `row_length` is below 1, or no document has two tokens.
    """

    def __init__(self, file: TokenFile, *, row_length: int, pad_token: int = 0) -> None:
        if row_length < 1:
            raise UserError(f"row_length = {row_length}; expected at least 1.")
        parts: list[tuple[int, int]] = []
        for document in range(len(file)):
            start, stop = file.bounds(document)
            parts += [(start + first, start + last) for first, last in cut(stop - start, row_length)]
        if not parts:
            raise UserError(
                "no document has two tokens, so there is nothing to predict; check how the documents were written."
            )
        rows = best_fit_decreasing([last - first for first, last in parts], row_length)
        self._rows = [[parts[item] for item in row] for row in rows]
        self._file, self._row_length, self._pad_token = file, row_length, pad_token

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return pack_row(
            [self._file.part(first, last + 1) for first, last in self._rows[index]],
            self._row_length,
            pad_token=self._pad_token,
        )
