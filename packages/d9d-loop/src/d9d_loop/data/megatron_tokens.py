"""Reader and writer of Megatron-LM's indexed datasets: tokens in `PREFIX.bin`, documents in `PREFIX.idx`.

The index has a header, the length of each sequence (int32), the byte at which it starts (int64), and for each document
the number of its first sequence (int64), with the number of sequences at the end. Numbers are little-endian.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

from d9d_dist import UserError
from d9d_loop.data.stored_tokens import TORCH_DTYPES, TokenArray, TokenDocuments, TokenPart, map_file, unpack

MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEADER = "<9sQBQQ"
_HEADER_BYTES = struct.calcsize(_HEADER)
_SMALL_VOCABULARY = 65_500
_MOST_TOKENS = 1 << 20


def megatron_prefix(path: Path) -> Path | None:
    """Return the prefix of an indexed dataset, given the prefix itself, the `.bin` or the `.idx`; else None."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    is_dataset = path.suffix == ".idx" or prefix.with_name(f"{prefix.name}.idx").is_file()
    return prefix if is_dataset else None


def megatron_files(prefix: Path) -> list[Path]:
    """Return the two files of an indexed dataset."""
    return [prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".idx", ".bin")]


def _read_header(index: mmap.mmap, path: Path) -> tuple[str, int, int]:
    """Return the dtype, and the numbers of sequences and documents; raise `UserError` if the index is damaged."""
    magic, version, code, num_sequences, num_bounds = unpack(_HEADER, index, path)
    if (magic, version) != (MAGIC, 1):
        raise UserError(f"{path} is not a Megatron-LM index of version 1; expected its first bytes. Write it again.")
    if (dtype := _DTYPES.get(code)) is None:
        raise UserError(f"{path} has the dtype code {code}; expected integers: {_DTYPES}. Write it with another dtype.")
    expected = _HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if len(index) == expected + num_sequences and num_sequences:
        raise UserError(f"{path} stores a mode for each sequence (multimodal); expected an index of texts. Write one.")
    if len(index) != expected or not num_bounds:
        raise UserError(
            f"{path} has {len(index)} bytes; expected {expected}, for {num_sequences} sequences and {num_bounds} "
            "document bounds. It was truncated or overwritten: copy or write it again."
        )
    if (last := unpack("<q", index, path, expected - 8)[0]) != num_sequences:
        raise UserError(
            f"{path}: the last document ends at sequence {last}; expected {num_sequences}, the number of sequences. "
            "Call end_document() after the last document, and write it again."
        )
    return dtype, num_sequences, num_bounds - 1


def megatron_part(prefix: Path) -> TokenPart:
    """Open an indexed dataset. Only the header and the sizes are read."""
    path, tokens_path = megatron_files(prefix)
    index = map_file(path)
    dtype, num_sequences, num_documents = _read_header(index, path)
    pointers, documents = _HEADER_BYTES + 4 * num_sequences, _HEADER_BYTES + 12 * num_sequences
    each = TORCH_DTYPES[dtype].itemsize
    num_tokens = 0
    if num_sequences:
        (start,), (length,) = unpack("<q", index, path, documents - 8), unpack("<i", index, path, pointers - 4)
        num_tokens = start // each + length
    if num_tokens <= 0:
        raise UserError(f"{tokens_path} has no tokens; expected at least one document. Check how it was written.")
    stored = TokenArray(map_file(tokens_path, num_bytes=num_tokens * each), dtype, 0, num_tokens * each)

    def start_of(sequence: int) -> int:
        if sequence == num_sequences:
            return num_tokens
        return struct.unpack_from("<q", index, pointers + 8 * sequence)[0] // each

    def bounds(document: int) -> tuple[int, int]:
        first, end = struct.unpack_from("<2q", index, documents + 8 * document)
        if not 0 <= first <= end <= num_sequences:
            return -1, -1
        return start_of(first), start_of(end)

    return TokenPart(tokens_path, num_documents, num_tokens, bounds, stored.read)


def write_megatron(file: TokenDocuments, prefix: Path, *, vocab_size: int) -> None:
    """Write documents as an indexed dataset, with the dtype that Megatron-LM chooses for the vocabulary size."""
    code, kind = (8, "H") if vocab_size < _SMALL_VOCABULARY else (4, "i")
    each = array(kind).itemsize
    index_path, tokens_path = megatron_files(prefix)
    with tokens_path.open("xb") as tokens:
        for block in blocks(file):
            tokens.write(array(kind, block).tobytes())
        os.fsync(tokens.fileno())
    with index_path.open("xb") as index:
        index.write(struct.pack(_HEADER, MAGIC, 1, code, len(file), len(file) + 1))
        for document in range(len(file)):
            start, stop = file.bounds(document)
            index.write(struct.pack("<i", stop - start))
        position = 0
        for document in range(len(file)):
            start, stop = file.bounds(document)
            index.write(struct.pack("<q", position * each))
            position += stop - start
        for document in range(len(file) + 1):
            index.write(struct.pack("<q", document))
        os.fsync(index.fileno())


def blocks(file: TokenDocuments) -> Iterator[list[int]]:
    """Yield the tokens of all documents, in blocks of at most 2^20 tokens."""
    for document in range(len(file)):
        start, stop = file.bounds(document)
        for first in range(start, stop, _MOST_TOKENS):
            block: list[int] = file.part(first, min(first + _MOST_TOKENS, stop))["tokens"].tolist()
            yield block
