"""Strict parser for safetensors headers: names, dtypes, shapes and byte ranges.

A file consists of an 8-byte little-endian header length, a JSON header of that length, and the tensors' bytes
(https://github.com/safetensors/safetensors#format). Duplicate keys and overlapping or non-contiguous byte ranges are
refused.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import final

import torch

from d9d_dist import UserError
from d9d_state._header_text import header_entries, integers
from d9d_state._member import open_member_file
from d9d_state.json_value import shortened
from d9d_state.tensor_info import TensorInfo

MAX_HEADER_BYTES = 1 << 25  # enough for about 200,000 tensors; bounds the memory of a hostile header

_NAME_OF_DTYPE: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
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
_MAX_KNOWN = 1000  # cache size: tensors of equal dtype and shape share one TensorInfo
_MAX_ELEMENTS = (1 << 63) - 1
_PAIRS = "F4"  # torch packs two 4-bit numbers into one element, the format counts each number


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        ValueError: If safetensors does not support the dtype.
    """
    if dtype not in _NAME_OF_DTYPE:
        raise ValueError(f"safetensors files cannot hold {dtype}; cast the tensor to another dtype first.")
    return _NAME_OF_DTYPE[dtype]


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a safetensors dtype name.

    Raises:
        ValueError: If `name` is not a safetensors dtype name.
    """
    if not isinstance(name, str) or name not in _DTYPE_OF_NAME:
        raise ValueError(f"got the dtype {name!r}; expected one of {', '.join(_DTYPE_OF_NAME)}.")
    return _DTYPE_OF_NAME[name]


def parse_shape(value: object) -> tuple[int, ...]:
    """Convert a parsed JSON list to a shape.

    Raises:
        ValueError: If the value is not a list of non-negative integers.
    """
    sizes = value if isinstance(value, list) else [None]
    shape = tuple(size for size in sizes if type(size) is int and 0 <= size < 1 << 62)
    if len(shape) != len(sizes):
        raise ValueError(f"got the shape {value!r}; expected a list of integers of 0 or more.")
    return shape


@final
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        info: Shape and dtype.
        start: Position of the first byte in the file. Elements are contiguous in row-major order.
    """

    info: TensorInfo
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Args:
        path: Regular file, or a symlink of the Hugging Face cache.

    Returns:
        The tensors of the file by name.

    Raises:
        UserError: If the file is missing or truncated, or its header is malformed.
    """
    with open_member_file(path.parent, path.name) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path} is not a safetensors file: got {size} bytes with a header of {length} bytes; "
                f"expected a header of 2 to {MAX_HEADER_BYTES} bytes within the file."
            )
        header = file.read(length)
    try:
        return parse_header(header, num_data_bytes=size - 8 - length)
    except ValueError as error:
        raise UserError(f"{path} has a malformed header: {error} Download or copy the file again.") from error


def parse_header(header: bytes, *, num_data_bytes: int) -> dict[str, StoredTensor]:
    """Parse a safetensors header.

    Args:
        header: JSON text, without the 8-byte length.
        num_data_bytes: Number of bytes after the header. The tensors must fill them exactly.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If the header is malformed.
    """
    data_start = 8 + len(header)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    known: dict[tuple[bytes, bytes], tuple[TensorInfo, int]] = {}
    for name, dtype, shape, offsets in header_entries(header):
        if name in tensors:
            raise ValueError(f"it repeats the name {shortened(name)}.")
        if (dtype, shape) not in known:
            if len(known) == _MAX_KNOWN:
                known.clear()
            info = _description(name, dtype, shape)
            known[dtype, shape] = info, info.num_bytes
        info, num_bytes = known[dtype, shape]
        begin, end = _span(name, offsets, info, num_bytes)
        if end > num_data_bytes:
            raise ValueError(f"{shortened(name)} ends at data byte {end}; the file has {num_data_bytes} data bytes.")
        tensors[name] = StoredTensor(info, data_start + begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(
                f"{shortened(name)} starts at byte {begin}; expected {position}, the end of the tensor before it."
            )
        position = end
    if position != num_data_bytes:
        raise ValueError(f"its tensors take {position} bytes; the file has {num_data_bytes} data bytes.")
    return tensors


def _span(name: str, offsets: bytes, info: TensorInfo, num_bytes: int) -> tuple[int, int]:
    span = integers(offsets)
    if len(span) != 2 or span[1] - span[0] != num_bytes:
        raise ValueError(
            f"{shortened(name)} has data_offsets {list(span)}, which do not match the size of {info.describe()}."
        )
    return span[0], span[1]


def _description(name: str, dtype: bytes, shape: bytes) -> TensorInfo:
    sizes = integers(shape)
    if prod(size for size in sizes if size) > _MAX_ELEMENTS:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}, whose size overflows int64.")
    if dtype.decode() != _PAIRS:
        return TensorInfo(sizes, dtype_of(dtype.decode()))
    if not sizes or sizes[-1] % 2:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}; expected an even last dim for dtype F4.")
    return TensorInfo((*sizes[:-1], sizes[-1] // 2), torch.float4_e2m1fn_x2)
