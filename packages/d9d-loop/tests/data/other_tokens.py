"""Files of other programs' token formats, written by formula: bytes as the formats' descriptions have them."""

import json
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

Documents = Sequence[Sequence[int]]
CODES = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H", "uint32": "I"}
MEGATRON = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def raw(tokens: Sequence[int], dtype: str) -> bytes:
    return array(CODES[dtype], tokens).tobytes()


def write_megatron(prefix: Path, documents: Sequence[Documents], dtype: str = "int32") -> Path:
    """Write documents, which are lists of sequences of tokens."""
    sequences = [tokens for document in documents for tokens in document]
    each, start, pointers, bounds = array(CODES[dtype]).itemsize, 0, [], [0]
    for tokens in sequences:
        pointers.append(start)
        start += len(tokens) * each
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(raw(tokens, dtype) for tokens in sequences))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, MEGATRON[dtype], len(sequences), len(bounds))
    lengths = raw([len(tokens) for tokens in sequences], "int32")
    index = header + lengths + raw(pointers, "int64") + raw(bounds, "int64")
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    return prefix


def write_llm_c(path: Path, tokens: Sequence[int], *, magic: int = 20240520, version: int = 1) -> Path:
    header = array("i", [magic, version, len(tokens)] + [0] * 253).tobytes()
    path.write_bytes(header + raw(tokens, "uint16" if magic == 20240520 else "uint32"))
    return path


def write_litdata(folder: Path, chunks: Sequence[Documents], *, data_format: str, dtype: str) -> Path:
    folder.mkdir()
    entries = []
    for number, documents in enumerate(chunks):
        body = [raw(tokens, dtype) for tokens in documents]
        offsets = [4 * (len(documents) + 2)]
        for each in body:
            offsets.append(offsets[-1] + len(each))
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(raw([len(documents), *offsets], "uint32") + b"".join(body))
        dim = sum(map(len, documents))
        entries.append({"chunk_bytes": offsets[-1], "chunk_size": len(documents), "dim": dim, "filename": name})
    config = {"compression": None, "data_format": [data_format], "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": entries, "config": config}))
    return folder


def write_mds(folder: Path, shards: Sequence[Documents], encoding: str, dtype: str) -> Path:
    """Write shards with a fixed column before the tokens, and a text behind it."""
    folder.mkdir()
    entries = []
    fixed = array(CODES[dtype]).itemsize * int(encoding.split(":")[2]) if encoding.count(":") == 2 else None
    for number, documents in enumerate(shards):
        samples = []
        for tokens in documents:
            body = _mds_shape(encoding, dtype, len(tokens)) + raw(tokens, dtype)
            sizes = ([len(body)] if fixed is None else []) + [3]
            samples.append(raw(sizes, "uint32") + b"12345678" + body + b"url")
        offsets = [4 * (len(documents) + 2) + 2]
        for each in samples:
            offsets.append(offsets[-1] + len(each))
        data = raw([len(documents), *offsets], "uint32") + b"{}" + b"".join(samples)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        entries.append(
            {
                "column_encodings": ["int", encoding, "str"],
                "column_names": ["id", "tokens", "url"],
                "column_sizes": [8, fixed, None],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(documents),
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return folder


def _mds_shape(encoding: str, dtype: str, length: int) -> bytes:
    if encoding == "bytes" or encoding.count(":") == 2:
        return b""
    codes = {"uint16": 16, "int32": 33, "int64": 65}
    kind = 0 if length < 256 else 1
    shape = struct.pack("<BB" if kind == 0 else "<BH", (1 << 2) | kind, length)
    return shape if ":" in encoding else bytes([codes[dtype]]) + shape
