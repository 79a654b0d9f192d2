"""Reader of W&B's own file: a LevelDB log of protocol buffers."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of all runs in a folder, the oldest run first."""
    from wandb.proto.wandb_internal_pb2 import Record  # ty: ignore[import-not-found] - made by protobuf

    for file in sorted(folder.rglob("*.wandb")):
        content, place, parts = file.read_bytes(), _HEADER, b""
        while place + _HEADER <= len(content):
            if _BLOCK - place % _BLOCK < _HEADER:
                place += _BLOCK - place % _BLOCK
                continue
            _, length, kind = struct.unpack("<IHB", content[place : place + _HEADER])
            parts += content[place + _HEADER : place + _HEADER + length]
            place += _HEADER + length
            if kind in (1, 4):  # a full record, or its last fragment
                yield Record.FromString(parts)
                parts = b""
