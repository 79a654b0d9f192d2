"""Protocol of stored, tokenized documents, and the class that reads those of other programs' formats.

A format is a function that returns a `TokenPart` for each of its files. Indices of documents are memory-mapped, so
neither the time to open a dataset nor the memory depends on the number of documents.
"""

import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import torch
from pydantic import BaseModel, JsonValue, ValidationError
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data.contents import digest_of_files
from d9d_loop.data.document import Document

_Model = TypeVar("_Model", bound=BaseModel)
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _INTEGERS}
"""Dtypes in which tokens are stored, by name."""
_NUM_CHECKED, _MOST_CHECKED = 64, 4096


class TokenDocuments(Protocol):
    """Map-style dataset of tokenized documents; positions of tokens are integers, contiguous within a document."""

    @property
    def has_masks(self) -> bool:
        """True if there is a loss mask for each token."""
        ...

    @property
    def has_documents(self) -> bool:
        """False if the format stores no document boundaries."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens, if they are contiguous across documents, else None."""
        ...

    @property
    def about(self) -> Mapping[str, JsonValue]:
        """Metadata from the writer, such as the tokenizer."""
        ...

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def __getitem__(self, document: int) -> Document:
        """Return the tokens of a document as int64 [n], and their mask as bool [n] if there are masks."""
        ...

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a document. Raise `IndexError` if there is no such document."""
        ...

    def part(self, start: int, stop: int) -> Document:
        """Return the tokens at the positions [start, stop), which belong to one document, and their mask."""
        ...

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return the tokens at the positions [start, stop), across documents if `num_tokens` is not None."""
        ...

    def contents_digest(self) -> JsonValue:
        """Return a digest of the files."""
        ...


@final
@dataclass(frozen=True, slots=True)
class TokenPart:
    """Documents of one file.

    Attributes:
        path: Path for error messages.
        num_positions: Positions are in [0, num_positions).
        bounds: Function that returns the positions [start, stop) of a document.
        read: Function that returns the tokens at the positions [start, stop) as int64.
        is_contiguous: True if `read` accepts positions of several documents, and each position has a token.
        has_documents: False if the file stores no document boundaries.
    """

    path: Path
    num_documents: int
    num_positions: int
    bounds: Callable[[int], tuple[int, int]]
    read: Callable[[int, int], Tensor]
    is_contiguous: bool = True
    has_documents: bool = True


@final
class StoredTokens:
    """Documents of files that another program wrote, concatenated. Implements `TokenDocuments`; see `open_tokens`.

    Args:
        reopen: Picklable function that opens the same files in another process.
        files: All files that determine the contents.
        vocab_size: If set, a token that is negative or not below it raises `UserError`.

    Raises:
        UserError: If some of the tokens are outside of the vocabulary. At most 64 documents are checked at the start,
            and each other one when it is read.
    """

    has_masks = False

    def __init__(
        self,
        parts: Sequence[TokenPart],
        *,
        files: Sequence[Path],
        reopen: Callable[[], TokenDocuments],
        vocab_size: int | None = None,
    ) -> None:
        self._parts, self._files, self._reopen, self._vocab_size = parts, files, reopen, vocab_size
        self._documents = list(accumulate((part.num_documents for part in parts), initial=0))
        self._positions = list(accumulate((part.num_positions for part in parts), initial=0))
        self.has_documents = all(part.has_documents for part in parts)
        self.num_tokens = self._positions[-1] if all(part.is_contiguous for part in parts) else None
        self.about: Mapping[str, JsonValue] = {}
        if not len(self) or self.num_tokens == 0:
            raise UserError(f"{parts[0].path} has no tokens; expected at least one document. Check how it was written.")
        if vocab_size is not None:
            self._check_some()

    def __len__(self) -> int:
        return self._documents[-1]

    def __getitem__(self, document: int) -> Document:
        """Return the tokens of a document as int64 [n]."""
        return self.part(*self.bounds(document))

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a document. Raise `IndexError` if there is no such document."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} is out of range: {self._parts[0].path} has {len(self)} documents")
        number = bisect_right(self._documents, document) - 1
        part, before = self._parts[number], self._positions[number]
        start, stop = part.bounds(document - self._documents[number])
        if not 0 <= start <= stop <= part.num_positions:
            raise UserError(
                f"{part.path} is damaged: document {document - self._documents[number]} has the positions {start} to "
                f"{stop}; expected a range within {part.num_positions} tokens. Copy or write it again."
            )
        return start + before, stop + before

    def part(self, start: int, stop: int) -> Document:
        """Return the tokens [start, stop), which belong to one document."""
        return {"tokens": self.tokens(start, stop)}

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return a copy of the tokens [start, stop) as int64 [stop - start], across documents and files."""
        assert 0 <= start <= stop <= self._positions[-1]
        pieces: list[Tensor] = []
        while start < stop:
            number = bisect_right(self._positions, start) - 1
            part, before = self._parts[number], self._positions[number]
            end = min(stop, self._positions[number + 1])
            pieces.append(self._checked(part, part.read(start - before, end - before)))
            start = end
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def contents_digest(self) -> JsonValue:
        """Return the digest of the files; see `digest_of_files`."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of_files(self._files)

    def __reduce__(self) -> tuple[Callable[[], TokenDocuments], tuple[()]]:
        return self._reopen, ()

    def _check_some(self) -> None:
        """Check the tokens of up to 64 documents, or of about 64 ranges if tokens are contiguous across documents."""
        if self.num_tokens is None:
            for document in range(0, len(self), -(-len(self) // _NUM_CHECKED)):
                start, stop = self.bounds(document)
                self.tokens(start, min(stop, start + _MOST_CHECKED))
            return
        for start in range(0, self.num_tokens, max(self.num_tokens // _NUM_CHECKED, _MOST_CHECKED)):
            self.tokens(start, min(start + _MOST_CHECKED, self.num_tokens))
        self.bounds(0), self.bounds(len(self) - 1)

    def _checked(self, part: TokenPart, tokens: Tensor) -> Tensor:
        if self._vocab_size is None:
            return tokens
        low, high = map(int, tokens.aminmax())
        if low < 0 or high >= self._vocab_size:
            raise UserError(
                f"{part.path} has the tokens {low} to {high}; expected 0 to {self._vocab_size - 1}, the vocabulary of "
                "the tokenizer. Name the tokenizer of these tokens, or check the format of the file."
            )
        return tokens


@final
class TokenArray:
    """Tokens of one dtype in the bytes [start, stop) of a memory-mapped file."""

    def __init__(self, file: mmap.mmap, dtype: str, start: int, stop: int) -> None:
        self._bytes, self._dtype = memoryview(file)[start:stop], TORCH_DTYPES[dtype]

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of the tokens [start, stop) as int64."""
        if start == stop:
            return torch.empty(0, dtype=torch.int64)
        each = self._dtype.itemsize
        # Copy the bytes, because torch.frombuffer warns about read-only memory such as this mapping.
        return torch.frombuffer(bytearray(self._bytes[start * each : stop * each]), dtype=self._dtype).long()


def map_file(path: Path, *, num_bytes: int | None = None) -> mmap.mmap:
    """Map a file into memory, read-only; raise `UserError` if it is missing or empty, or not `num_bytes` long."""
    if not path.is_file():
        raise UserError(f"{path} is missing; expected it beside the other files of these tokens. Copy all files.")
    found = path.stat().st_size
    if num_bytes is not None and found != num_bytes:
        raise UserError(
            f"{path} has {found} bytes; expected {num_bytes}, as its header, index or manifest says. It was "
            "truncated or overwritten: copy or write it again."
        )
    if not found:
        raise UserError(f"{path} is empty; expected a file with tokens. Copy or write it again.")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def validated(model: type[_Model], path: Path, text: bytes, *, expected: str) -> _Model:
    """Parse the JSON text of a file; raise `UserError` with the first problem if it is not that of the model."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path}: {where}: {first['msg']}; expected {expected}. Copy or write the file again."
        ) from None


def unpack(layout: str, file: mmap.mmap, path: Path, offset: int = 0) -> tuple[Any, ...]:
    """Return the integers at an offset of a file; raise `UserError` if the file ends before them."""
    if offset + struct.calcsize(layout) > len(file):
        raise UserError(f"{path} has {len(file)} bytes, which is less than its header; copy or write it again.")
    return struct.unpack_from(layout, file, offset)
