"""Safetensors files, written in one pass with their digest; every call can be counted."""

import ctypes
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from d9d_state._files import FileRecord, write_file
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.safetensors_header import dtype_name
from d9d_state.tensor_info import TensorInfo


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a file that does not exist yet, and bring it to the disk.

    Args:
        path: The file.
        tensors: Plain tensors of any device; each is moved to the CPU when its turn comes.
        metadata: Texts for the header's `__metadata__`.

    Returns:
        Its size and digest.

    Raises:
        ValueError: If a dtype has no place in the format.
    """
    return write_file(path, _serialized(tensors, metadata))


def _serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    # The format wants every tensor aligned to its item size, so those with larger items come first.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header: dict[str, JsonValue] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered.items():
        end = offset + TensorInfo.of(tensor).num_bytes
        header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in ordered.values():
        on_cpu = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        yield _bytes_of(on_cpu)


def _bytes_of(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.dtype.itemsize
    if size == 0:
        return memoryview(b"")
    # NumPy, which would give a buffer too, is optional for torch. The view is used while `tensor` is alive.
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
