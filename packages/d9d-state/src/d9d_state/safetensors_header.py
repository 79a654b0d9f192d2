"""The header of a safetensors file, read strictly: what the file holds and where, before a tensor is read.

The format is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes
(https://github.com/safetensors/safetensors#format). A header that repeats a key, overlaps or leaves holes is refused.
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

MAX_HEADER_BYTES = 1 << 25  # room for about 200,000 tensors, and a bound on what a hostile header can cost

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
_MAX_KNOWN = 1000  # tensors that are alike share one description
_MAX_ELEMENTS = (1 << 63) - 1
_PAIRS = "F4"  # torch keeps two numbers of 4 bits in one element, the format counts each


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

    Args:
        path: A regular file, or a link of the Hugging Face cache.

    Raises:
        UserError: If there is no such file, if it is not whole, or its header is not sound.
    """
    with open_member_file(path.parent, path.name) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path} is no safetensors file: {size} bytes with a header of {length}; "
                f"expected a header of 2 to {MAX_HEADER_BYTES} bytes within the file."
            )
        header = file.read(length)
    try:
        return parse_header(header, num_data_bytes=size - 8 - length)
    except ValueError as error:
        raise UserError(f"{path} has a broken header: {error} Get the file anew.") from error


def parse_header(header: bytes, *, num_data_bytes: int) -> dict[str, StoredTensor]:
    """The tensors that a header describes.

    Args:
        header: The JSON, without its length.
        num_data_bytes: What follows it in the file. No size in the header is believed that exceeds it.

    Raises:
        ValueError: If the header is not sound.
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
            raise ValueError(f"{shortened(name)} ends at byte {end} of the {num_data_bytes} that the file has.")
        tensors[name] = StoredTensor(info, data_start + begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(
                f"{shortened(name)} starts at byte {begin}; expected {position}, where the one before it ends."
            )
        position = end
    if position != num_data_bytes:
        raise ValueError(f"its tensors take {position} bytes, but the file has {num_data_bytes}.")
    return tensors


def _span(name: str, offsets: bytes, info: TensorInfo, num_bytes: int) -> tuple[int, int]:
    span = integers(offsets)
    if len(span) != 2 or span[1] - span[0] != num_bytes:
        raise ValueError(f"{shortened(name)} has data_offsets {list(span)}, which do not fit {info.describe()}.")
    return span[0], span[1]


def _description(name: str, dtype: bytes, shape: bytes) -> TensorInfo:
    sizes = integers(shape)
    if prod(size for size in sizes if size) > _MAX_ELEMENTS:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}, which no memory can hold.")
    if dtype.decode() != _PAIRS:
        return TensorInfo(sizes, dtype_of(dtype.decode()))
    if not sizes or sizes[-1] % 2:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}; expected an even last size of numbers in F4.")
    return TensorInfo((*sizes[:-1], sizes[-1] // 2), torch.float4_e2m1fn_x2)
