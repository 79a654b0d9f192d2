"""Memory-mapped tokens of many documents. The time to open a token file does not depend on the number of documents.

A token file is a folder of three or four files. `tokens.bin` has the concatenated tokens of all documents.
`documents.bin` has the start of each document, in tokens, and the end of the last one, as int64. `masks.bin`, if there
are loss masks, has a byte for each token: 1 if the token contributes to the loss as a label, else 0. `manifest.json`
has the token dtype, the counts, and the sizes and digests of the other files. Numbers are little-endian.
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, final

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, PositiveInt
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.errors import may_pass
from d9d_loop.data.document import Document
from d9d_loop.data.stored_tokens import TORCH_DTYPES, TokenArray, map_file, validated

TokenDtype = Literal["uint16", "uint32"]
"""Storage dtype of tokens: uint16 for vocabularies of up to 65,536 tokens, else uint32."""

MANIFEST, TOKENS, DOCUMENTS, MASKS = "manifest.json", "tokens.bin", "documents.bin", "masks.bin"
_OFFSET_BYTES = 8
_BOUNDS = struct.Struct("<2q")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@final
class FileRecord(_Strict):
    """Size of a file in bytes, and its SHA-256 digest in hexadecimal."""

    bytes: NonNegativeInt
    sha256: str


@final
class TokenManifest(_Strict):
    """Contents of `manifest.json`.

    Attributes:
        files: Size and digest of each other file, by file name.
        about: Metadata from the writer, such as the tokenizer and its digest.
    """

    format: Literal["d9d-tokens-1"] = "d9d-tokens-1"
    dtype: TokenDtype
    num_tokens: PositiveInt
    num_documents: PositiveInt
    files: dict[str, FileRecord]
    about: dict[str, JsonValue] = {}

    @property
    def token_bytes(self) -> int:
        """Size of a stored token in bytes."""
        return TORCH_DTYPES[self.dtype].itemsize


@final
class TokenFile:
    """Map-style dataset of the documents in a folder that `TokenFileWriter` wrote. A sample is `{"tokens": ...}`.

    Implements `TokenDocuments`.

    The constructor reads only the manifest and the file sizes. Instances can be pickled: the receiving process opens
    the files itself.

    Attributes:
        has_masks: True if the file has a loss mask for each token.

    Raises:
        UserError: If the manifest cannot be read, or a file size differs from the manifest.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self.manifest = _read_manifest(self._folder)
        tokens, self._offsets = (self._map(name) for name in (TOKENS, DOCUMENTS))
        self._tokens = TokenArray(tokens, self.manifest.dtype, 0, len(tokens))
        self.has_masks = MASKS in self.manifest.files
        self._masks = self._map(MASKS) if self.has_masks else None

    has_documents = True

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return self.manifest.num_tokens

    @property
    def about(self) -> Mapping[str, JsonValue]:
        """Metadata from the writer, as in the manifest."""
        return self.manifest.about

    def __len__(self) -> int:
        return self.manifest.num_documents

    def __getitem__(self, document: int) -> Document:
        """Return the tokens of a document as int64 [n], and their mask as bool [n] if the file has masks."""
        return self.part(*self.bounds(document))

    def part(self, start: int, stop: int) -> Document:
        """Return the tokens [start, stop), which belong to one document, and their mask if the file has masks."""
        part: Document = {"tokens": self.tokens(start, stop)}
        if self._masks is not None:
            part["mask"] = torch.frombuffer(bytearray(memoryview(self._masks)[start:stop]), dtype=torch.uint8).bool()
        return part

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the token range [start, stop) of a document. Raise `IndexError` if there is no such document."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} is out of range: {self._folder} has {len(self)} documents")
        start, stop = _BOUNDS.unpack_from(self._offsets, document * _OFFSET_BYTES)
        return start, stop

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return a copy of the tokens [start, stop), possibly across documents, as int64 [stop - start]."""
        assert 0 <= start <= stop <= self.manifest.num_tokens
        return self._tokens.read(start, stop)

    def contents_digest(self) -> JsonValue:
        """Return the digests of the files, as in the manifest."""
        return {name: record.sha256 for name, record in self.manifest.files.items()}

    def verify(self) -> None:
        """Read all files, compare their digests, and check that the documents are contiguous and not empty.

        A damaged file raises `UserError`, which names it.
        """
        for name, record in self.manifest.files.items():
            with (self._folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != record.sha256:
                raise UserError(
                    f"{self._folder / name} is damaged: its SHA-256 digest is {digest[:16]}..., expected "
                    f"{record.sha256[:16]}... Copy or write the file again."
                )
        before = 0
        for document in range(len(self)):
            start, stop = self.bounds(document)
            if start != before or stop <= start:
                raise UserError(
                    f"{self._folder / DOCUMENTS}: document {document} has the token range {start} to {stop}; expected "
                    f"a range that starts at {before} and is not empty. Write the file again."
                )
            before = stop

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        return TokenFile, (self._folder,)

    def _map(self, name: str) -> mmap.mmap:
        manifest = self.manifest
        implied = {
            TOKENS: manifest.num_tokens * manifest.token_bytes,
            DOCUMENTS: (manifest.num_documents + 1) * _OFFSET_BYTES,
            MASKS: manifest.num_tokens,
        }[name]
        record = manifest.files.get(name)
        if record is None or record.bytes != implied:
            raise UserError(
                f"{self._folder / MANIFEST} records {'no' if record is None else record.bytes} bytes for {name}; "
                f"expected {implied}, for {manifest.num_documents} documents with {manifest.num_tokens} tokens of "
                f"{manifest.dtype}. Write the file again."
            )
        return map_file(self._folder / name, num_bytes=implied)


def _read_manifest(folder: Path) -> TokenManifest:
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        if may_pass(error):
            raise
        raise UserError(
            f"{path} cannot be read ({error.strerror}); expected a folder of tokens. Write one with "
            "`python -m d9d_loop.data`, or TokenFileWriter."
        ) from None
    return validated(TokenManifest, path, text, expected="the manifest of a token file")
