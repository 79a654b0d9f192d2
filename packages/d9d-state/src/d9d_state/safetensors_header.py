"""The header of a safetensors file, read strictly: what the file holds and where, before a tensor is read.

The format is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes
(https://github.com/safetensors/safetensors#format). A header that repeats a key, overlaps or leaves holes is refused.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from d9d_dist import UserError
from d9d_state.json_value import JsonValue, parse_json
from d9d_state.tensor_info import TensorInfo

MAX_HEADER_BYTES = 1 << 25  # room for about 200,000 tensors, and a bound on what a hostile header can cost

_NAME_OF_DTYPE: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_DTYPE.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the format gives to a dtype.

    Raises:
        ValueError: If it has none.
    """
    if dtype not in _NAME_OF_DTYPE:
        raise ValueError(f"safetensors files cannot hold {dtype}; cast the tensor to another dtype first.")
    return _NAME_OF_DTYPE[dtype]


def dtype_of(name: object) -> torch.dtype:
    """The dtype that the format means by a name.

    Raises:
        ValueError: If it is not one of the format's.
    """
    if not isinstance(name, str) or name not in _DTYPE_OF_NAME:
        raise ValueError(f"got the dtype {name!r}; expected one of {', '.join(_DTYPE_OF_NAME)}.")
    return _DTYPE_OF_NAME[name]


def parse_shape(value: object) -> tuple[int, ...]:
    """A shape as JSON holds it.

    Raises:
        ValueError: If it is not a list of sizes.
    """
    sizes = value if isinstance(value, list) else [None]
    shape = tuple(size for size in sizes if type(size) is int and 0 <= size < 1 << 62)
    if len(shape) != len(sizes):
        raise ValueError(f"got the shape {value!r}; expected a list of sizes.")
    return shape


@final
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        info: What it is.
        start: Position of its first byte in the file; the others follow in row-major order.
    """

    info: TensorInfo
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, from its header alone.

    Raises:
        UserError: If the file is not whole or its header is not sound.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path} is no safetensors file: {size} bytes with a header of {length}; "
                f"expected a header of 2 to {MAX_HEADER_BYTES} bytes within the file."
            )
        header = file.read(length)
    try:
        return _parse_header(header, data_start=8 + length, size=size)
    except ValueError as error:
        raise UserError(f"{path} has a broken header: {error} Get the file anew.") from error


def _parse_header(data: bytes, *, data_start: int, size: int) -> dict[str, StoredTensor]:
    header = parse_json(data)
    if not isinstance(header, dict):
        raise ValueError("it is no JSON object.")
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name != "__metadata__":
            info, (begin, end) = _parse_entry(name, entry)
            tensors[name] = StoredTensor(info, data_start + begin)
            spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(f"{name} starts at byte {begin}; expected {position}, where the one before it ends.")
        position = end
    if position != size - data_start:
        raise ValueError(f"its tensors take {position} bytes, but the file has {size - data_start}.")
    return tensors


def _parse_entry(name: str, entry: JsonValue) -> tuple[TensorInfo, tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have dtype, shape and data_offsets.")
    info = TensorInfo(parse_shape(entry["shape"]), dtype_of(entry["dtype"]))
    offsets = parse_shape(entry["data_offsets"])
    if len(offsets) != 2 or offsets[1] - offsets[0] != info.num_bytes:
        raise ValueError(f"{name} has data_offsets {list(offsets)}, which do not fit {info.describe()}.")
    return info, (offsets[0], offsets[1])
