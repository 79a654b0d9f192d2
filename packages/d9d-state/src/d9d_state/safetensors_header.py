"""Headers of safetensors files: names, dtypes, shapes and byte ranges, parsed by the safetensors library.

A file consists of an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/safetensors/safetensors#format). The library refuses overlapping or non-contiguous byte ranges.
However, it accepts repeated names and any number of dims, and may need 20 times a hostile header's size in memory. So
this module first scans the header without allocations.
"""

import re
import struct
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from d9d_dist import UserError
from d9d_state._member import AnyPath, open_reader
from d9d_state.errors import StateError
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
_MAX_ELEMENTS = (1 << 63) - 1
_PAIRS = "F4"  # torch packs two 4-bit numbers into one element; the format counts each number
_MAX_NAME = 10_000  # characters
_MAX_SHOWN = 300  # characters in an error message about an untrusted header

_SPACE = rb"[ \t\n\r]{0,1000}+"
_STRING = rb'"(?:[^"\\]{1,10000}+|\\.){0,10000}+"'
_INTEGERS = rb"\[%(s)b(?:[0-9]{1,20}(?:%(s)b,%(s)b[0-9]{1,20}){0,63}+)?+%(s)b\]" % {b"s": _SPACE}
_FIELD = rb'"(?:dtype|shape|data_offsets)"%(s)b:%(s)b(?:"[A-Z0-9_]{1,20}"|%(i)b)%(s)b' % {b"s": _SPACE, b"i": _INTEGERS}
_PATTERNS = {b"s": _SPACE, b"t": _STRING, b"f": _FIELD}
_TENSOR = re.compile(rb"%(s)b%(t)b%(s)b:%(s)b\{(?:%(s)b%(f)b,){2}%(s)b%(f)b\}%(s)b([,}])" % _PATTERNS)
_PAIR = rb"%(s)b%(t)b%(s)b:%(s)b%(t)b%(s)b" % _PATTERNS
_METADATA = re.compile(
    rb'%(s)b"__metadata__"%(s)b:%(s)b\{(?:%(p)b(?:,%(p)b)*+|%(s)b)\}%(s)b([,}])' % {**_PATTERNS, b"p": _PAIR}
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype; raise `ValueError` if there is none."""
    if dtype not in _NAME_OF_DTYPE:
        todo = "cast the tensor to another dtype first"
        if dtype.is_complex:
            todo = "use complex64, or pass torch.view_as_real(tensor)"
        raise ValueError(f"safetensors files do not support {dtype}; {todo}.")
    return _NAME_OF_DTYPE[dtype]


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a safetensors dtype name; raise `ValueError` for any other value."""
    if not isinstance(name, str) or name not in _DTYPE_OF_NAME:
        raise ValueError(f"got the dtype {name!r}; expected one of {', '.join(_DTYPE_OF_NAME)}.")
    return _DTYPE_OF_NAME[name]


def parse_shape(value: object) -> tuple[int, ...]:
    """Convert a parsed JSON list to a shape; raise `ValueError` if it is not a list of non-negative integers."""
    sizes = value if isinstance(value, list) else [None]
    shape = tuple(size for size in sizes if type(size) is int and 0 <= size < 1 << 62)
    if len(shape) != len(sizes):
        raise ValueError(f"got the shape {value!r}; expected a list of integers of 0 or more.")
    return shape


@final
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a safetensors file, with the byte offset of its data: contiguous, in row-major order.

    `stamp` is that of the file's reader (`MemberReader`), to find out if the file was replaced; `None` if not known.
    """

    info: TensorInfo
    start: int
    stamp: tuple[object, ...] | None = None


def read_header(path: AnyPath) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in file order.

    `path` may be a symlink of the Hugging Face cache. Raises `UserError` if the file is missing, truncated or
    malformed, and `StateError` if a process or system limit prevents opening.
    """
    with closing(open_reader(path.parent, path.name)) as reader:
        size, prefix = reader.size, reader.read(8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path} is not a safetensors file: got {size} bytes with a header of {length} bytes; "
                f"expected a header of 2 to {MAX_HEADER_BYTES} bytes within the file."
            )
        header = reader.read(length, 8)
    try:
        num_tensors = _num_tensors(header)
        with _local(path, prefix, header, size) as file, safe_open(file, framework="pt") as opened:
            names = opened.offset_keys()
            infos = {name: _info(name, opened.get_slice(name)) for name in names}
        if len(names) != num_tensors:
            raise ValueError(f"its names are not unique: it has {num_tensors} tensors with {len(names)} names.")
    except (OSError, RuntimeError) as error:
        raise StateError(f"{path} cannot be opened: {error}") from error
    except (ValueError, SafetensorError) as error:
        raise UserError(
            f"{path} has a malformed header: {str(error)[:_MAX_SHOWN]} Download or copy the file again."
        ) from error
    tensors: dict[str, StoredTensor] = {}
    start = 8 + length
    for name, info in infos.items():
        tensors[name] = StoredTensor(info, start, reader.stamp)
        start += info.num_bytes
    return tensors


@contextmanager
def _local(path: AnyPath, prefix: bytes, header: bytes, size: int) -> Generator[Path]:
    """Yield a local file for the library: `path` itself, or a sparse file with an object's header and size."""
    if isinstance(path, Path):
        yield path
        return
    with NamedTemporaryFile(prefix="d9d-header-") as file:
        file.write(prefix)
        file.write(header)
        file.truncate(size)
        file.flush()
        yield Path(file.name)


def _num_tensors(header: bytes) -> int:
    """Count the tensors of a header; raise `ValueError` at the first malformed entry."""
    if re.fullmatch(rb"\{[ \t\n\r]*+\}[ \t\n\r]*+", header) is not None:
        return 0
    if not header.startswith(b"{"):
        raise ValueError("it is not a JSON object.")
    position, count, end = 1, 0, b","
    while end == b",":
        tensor = _TENSOR.match(header, position)
        match = tensor or _METADATA.match(header, position)
        if match is None:
            raise ValueError(
                f"after byte {position} it has {header[position : position + 80]!r}; "
                'expected a tensor like "name": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}.'
            )
        position, count, end = match.end(), count + (tensor is not None), match[1]
    return count


def _info(name: str, stored: Any) -> TensorInfo:
    sizes, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if len(name) > _MAX_NAME:
        raise ValueError(f"it has a name of {len(name)} characters; expected at most {_MAX_NAME}.")
    if prod(size for size in sizes if size) > _MAX_ELEMENTS:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}, whose size overflows int64.")
    if dtype != _PAIRS:
        return TensorInfo(sizes, dtype_of(dtype))
    if not sizes or sizes[-1] % 2:
        raise ValueError(f"{shortened(name)} has the shape {list(sizes)}; expected an even last dim for dtype F4.")
    return TensorInfo((*sizes[:-1], sizes[-1] // 2), torch.float4_e2m1fn_x2)
