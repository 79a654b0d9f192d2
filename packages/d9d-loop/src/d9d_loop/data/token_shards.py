"""Readers of tokens in one binary file each: shards of nanoGPT and llm.c, chunks of litdata, shards of MosaicML."""

import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt

from d9d_dist import UserError
from d9d_loop.data.megatron_tokens import blocks
from d9d_loop.data.stored_tokens import TORCH_DTYPES, TokenArray, TokenDocuments, TokenPart, map_file, unpack, validated

_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # by magic number: version and dtype
_LLM_C_HEADER = 1024
_LARGEST_HIGH_HALF = 3
_LITDATA_TENSORS = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64"}
_LITDATA_TENSORS |= {18: "int64", 20: "uint16"}
_LITDATA_ARRAYS = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_MDS_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
TOKEN_FIELDS = ("tokens", "input_ids")
"""Names of columns with tokens."""
_MASK_FIELDS = {"labels", "attention_mask", "loss_mask", "mask"}
_DOCUMENT_BITS = 32


def bin_part(path: Path) -> TokenPart:
    """Open a `.bin` file of llm.c, which has a header, or of nanoGPT, which has only tokens of 16 bits.

    Both store no document boundaries. Files of other contents raise `UserError` where it can be seen.
    """
    file = map_file(path)
    first = unpack("<2i", file, path) if len(file) >= _LLM_C_HEADER else (0, 0)
    if first[0] in _LLM_C:
        stored = _llm_c_array(path)
    else:
        if len(file) % 2:
            raise UserError(
                f"{path} has {len(file)} bytes; expected an even number, for nanoGPT's tokens of 16 bits, or the "
                "header of llm.c. Check its format, and whether it is truncated."
            )
        stored = TokenArray(file, "uint16", 0, len(file))
        _check_16_bits(path, stored)
    size = len(stored)
    return TokenPart(path, 1, size, lambda document: (0, size), stored.read, has_documents=False)


def _llm_c_array(path: Path) -> TokenArray:
    magic, version, num_tokens = unpack("<3i", map_file(path), path)
    wanted, dtype = _LLM_C[magic]
    if version != wanted:
        raise UserError(f"{path} is a shard of llm.c of version {version}; expected {wanted}. Write it again.")
    size = _LLM_C_HEADER + num_tokens * TORCH_DTYPES[dtype].itemsize
    return TokenArray(map_file(path, num_bytes=size), dtype, _LLM_C_HEADER, size)


def _check_16_bits(path: Path, stored: TokenArray) -> None:
    """Raise `UserError` if each second value is nearly zero, as in tokens of 32 or 64 bits."""
    tokens = stored.read(0, min(len(stored), 4096) // 2 * 2)
    if len(tokens) and int(tokens[1::2].max()) <= _LARGEST_HIGH_HALF < int(tokens[::2].max()):
        raise UserError(
            f"{path}: every second value of 16 bits is at most {_LARGEST_HIGH_HALF}, so its tokens have 32 bits or "
            "more; expected nanoGPT's 16 bits. If it is a .bin of Megatron-LM, put its .idx beside it."
        )


def write_bin(file: TokenDocuments, path: Path, *, vocab_size: int, header: bool) -> None:
    """Write documents, concatenated, as a shard of llm.c, or without a header as nanoGPT's."""
    magic = next(magic for magic, (_, dtype) in _LLM_C.items() if dtype != "uint16" or vocab_size <= 1 << 16)
    version, dtype = _LLM_C[magic]
    if not header and dtype != "uint16":
        raise UserError(f"nanoGPT's format has 16 bits, and the vocabulary {vocab_size} tokens. Choose llm.c.")
    assert file.num_tokens is not None
    if header and file.num_tokens >= 1 << 31:
        raise UserError(f"a shard of llm.c has less than 2^31 tokens; got {file.num_tokens}. Choose megatron.")
    with path.open("xb") as output:
        if header:
            output.write(struct.pack("<3i", magic, version, file.num_tokens).ljust(_LLM_C_HEADER, b"\0"))
        for block in blocks(file):
            output.write(array("H" if dtype == "uint16" else "I", block).tobytes())


class _Chunk(BaseModel):
    filename: str
    chunk_size: NonNegativeInt
    dim: NonNegativeInt


class _LitDataConfig(BaseModel):
    data_format: Any
    compression: Any = None
    encryption: Any = None


class _LitData(BaseModel):
    chunks: list[_Chunk] = Field(min_length=1)
    config: _LitDataConfig


class _MdsFile(BaseModel):
    basename: str
    bytes: NonNegativeInt


class _Shard(BaseModel):
    column_encodings: list[str]
    column_names: list[str]
    column_sizes: list[int | None]
    format: str
    version: int
    raw_data: _MdsFile
    zip_data: _MdsFile | None
    samples: NonNegativeInt


class _Mds(BaseModel):
    shards: list[_Shard] = Field(min_length=1)


def indexed_parts(folder: Path) -> list[TokenPart]:
    """Open a folder with an `index.json` of MosaicML or of litdata."""
    path = folder / "index.json"
    text = path.read_bytes()
    expected = "an index of MosaicML or litdata"
    if b'"shards"' in text:
        return [_mds_part(folder, shard) for shard in validated(_Mds, path, text, expected=expected).shards]
    return _litdata_parts(folder, validated(_LitData, path, text, expected=expected))


def _litdata_parts(folder: Path, index: "_LitData") -> list[TokenPart]:
    """Open the chunks of a litdata dataset of plain tokens, which `TokensLoader` reads. An item is a document."""
    formats = index.config.data_format
    kind, _, code = formats[0].partition(":") if isinstance(formats, list) and len(formats) == 1 else ("", "", "")
    tables = {"no_header_tensor": _LITDATA_TENSORS, "no_header_numpy": _LITDATA_ARRAYS}
    dtype = tables.get(kind, {}).get(int(code) if code.isdigit() else -1)
    if dtype is None or index.config.compression or index.config.encryption:
        raise UserError(
            f"{folder} is a litdata dataset with items of {formats}, compression {index.config.compression}; expected "
            "one array of integers for each item, without compression. Write it with item_loader=TokensLoader()."
        )
    return [_litdata_part(folder / chunk.filename, chunk, dtype) for chunk in index.chunks]


def _litdata_part(path: Path, chunk: "_Chunk", dtype: str) -> TokenPart:
    num_items, each = chunk.chunk_size, TORCH_DTYPES[dtype].itemsize
    header = 4 * (num_items + 2)
    size = header + chunk.dim * each
    file = map_file(path, num_bytes=size)
    if unpack("<I", file, path) != (num_items,):
        raise UserError(f"{path} has another number of items than {num_items}, as in index.json; copy it again.")
    stored = TokenArray(file, dtype, header, size)

    def bounds(document: int) -> tuple[int, int]:
        start, stop = struct.unpack_from("<2I", file, 4 * (document + 1))
        return (start - header) // each, (stop - header) // each

    return TokenPart(path, num_items, len(stored), bounds, stored.read)


def _mds_part(folder: Path, shard: "_Shard") -> TokenPart:
    """Open a shard of a MosaicML dataset; a sample is a document. `bytes` are tokens of int64, as in llm-foundry."""
    path = folder / shard.raw_data.basename
    names, encodings = shard.column_names, shard.column_encodings
    if (shard.format, shard.version) != ("mds", 2):
        raise UserError(f"{path} has the format {shard.format}, version {shard.version}; expected mds, version 2.")
    if shard.zip_data and not path.is_file():
        raise UserError(
            f"{path} is missing, and {shard.zip_data.basename} is compressed; expected the file without "
            "compression. Decompress it."
        )
    found = [number for number, name in enumerate(names) if name in TOKEN_FIELDS]
    if len(found) != 1 or _MASK_FIELDS & set(names):
        raise UserError(
            f"{path} has the columns {', '.join(names)}; expected one of {' or '.join(TOKEN_FIELDS)}, and no masks or "
            "labels. Write a dataset for pretraining."
        )
    file = map_file(path, num_bytes=shard.raw_data.bytes)
    num_samples = shard.samples
    offsets = 4 * (num_samples + 1)
    if unpack("<I", file, path) != (num_samples,) or unpack("<I", file, path, offsets) != (len(file),):
        raise UserError(f"{path} is damaged: its header does not have {num_samples} samples. Copy or write it again.")
    decode = _decoder(path, encodings[found[0]])

    def locate(document: int) -> TokenArray:
        start, stop = struct.unpack_from("<2I", file, 4 * (document + 1))
        place = _column(memoryview(file)[start:stop], shard.column_sizes, found[0])
        if place is None:
            raise UserError(f"{path} is damaged: sample {document} is at {start} to {stop}. Copy or write it again.")
        return decode(file, start + place[0], start + place[1])

    def bounds(document: int) -> tuple[int, int]:
        return document << _DOCUMENT_BITS, (document << _DOCUMENT_BITS) + len(locate(document))

    def read(start: int, stop: int) -> Any:
        before = start >> _DOCUMENT_BITS << _DOCUMENT_BITS
        return locate(start >> _DOCUMENT_BITS).read(start - before, stop - before)

    return TokenPart(path, num_samples, num_samples << _DOCUMENT_BITS, bounds, read, is_contiguous=False)


def _column(sample: memoryview, sizes: list[int | None], column: int) -> tuple[int, int] | None:
    """Return the bytes of a column; None if the sample is damaged.

    A sample has a size of 4 bytes for each column of no fixed size, then the columns.
    """
    body = 4 * sizes.count(None)
    if len(sample) < body:
        return None
    stored = iter(struct.unpack_from(f"<{body // 4}I", sample))
    widths = [next(stored) if size is None else size for size in sizes]
    first = body + sum(widths[:column])
    return (first, first + widths[column]) if body + sum(widths) == len(sample) else None


def _decoder(path: Path, encoding: str) -> Callable[[Any, int, int], TokenArray]:
    """Return a function of a file and a range of bytes, for an encoding of MosaicML's format."""
    kind, *given = encoding.split(":")
    dtype = given[0] if given else None
    if kind == "bytes":
        return lambda file, start, stop: TokenArray(file, "int64", start, stop)
    if kind != "ndarray" or (dtype is not None and dtype not in TORCH_DTYPES) or "," in "".join(given[1:]):
        raise UserError(
            f"{path} has tokens with the encoding {encoding}; expected bytes, or ndarray of integers in 1-D."
        )

    def decode(file: Any, start: int, stop: int) -> TokenArray:
        found = dtype
        if found is None:
            found, start = _MDS_DTYPES.get(file[start]), start + 1
        if len(given) <= 1:  # bits of the byte before the shape: number of dims, and binary logarithm of its bytes
            is_row = file[start] >> 2 == 1
            start += 1 + (1 << (file[start] & 3))
            found = found if is_row else None
        if found is None:
            raise UserError(f"{path} has a sample that is not a row of integers; expected tokens. Write it again.")
        return TokenArray(file, found, start, stop)

    return decode
