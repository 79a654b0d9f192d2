"""Writers of safetensors files: a whole file in one pass, or one tensor at a time in any order."""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from torch import Tensor

from d9d_state._digests import PartRecord
from d9d_state._files import write_file
from d9d_state._member import AnyPath
from d9d_state._tensor_bytes import bytes_of
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.safetensors_header import MAX_HEADER_BYTES, dtype_name
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a safetensors file: its first bytes, the byte offset of each tensor, and its size."""

    header: bytes
    starts: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], *, metadata: Mapping[str, str] | None = None) -> Self:
        """Compute the layout; raise `ValueError` for unsupported dtypes and headers above the size limit."""
        # Each tensor must be aligned to its item size, so tensors with larger items come first.
        ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        header: dict[str, JsonValue] = {} if metadata is None else {"__metadata__": dict(metadata)}
        offsets: dict[str, int] = {}
        end = 0
        for name, info in ordered.items():
            offsets[name], end = end, end + info.num_bytes
            header[name] = {
                "dtype": dtype_name(info.dtype),
                "shape": list(info.shape),
                "data_offsets": [offsets[name], end],
            }
        text = dump_json(header)
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(
                f"got {len(tensors)} tensors for one file, with a header of {len(text)} bytes; expected at most "
                f"{MAX_HEADER_BYTES}. Write several files."
            )
        first = struct.pack("<Q", len(text)) + text
        return cls(first, {name: len(first) + offset for name, offset in offsets.items()}, len(first) + end)


@final
@dataclass(frozen=True, slots=True)
class SafetensorsRecord:
    """Sizes and digests of a file's header and tensors, in the order of the file, which has no gaps."""

    header: PartRecord
    tensors: Mapping[str, PartRecord]


def write_safetensors(path: AnyPath, tensors: Mapping[str, Tensor]) -> SafetensorsRecord:
    """Write plain tensors to a new safetensors file and fsync it; return the size and digest of each part.

    Tensors are copied to the CPU one at a time and must not change before this returns.
    """
    layout = FileLayout.of({name: TensorInfo.of(tensor) for name, tensor in tensors.items()})

    def parts() -> Iterator[bytes | memoryview]:
        yield layout.header
        for name in layout.starts:
            yield _copied(tensors[name])

    header, *records = write_file(path, parts())
    return SafetensorsRecord(header, dict(zip(layout.starts, records, strict=True)))


@final
class StreamedFile:
    """New safetensors file that takes one tensor at a time; complete and fsynced when `close` returns."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], *, metadata: Mapping[str, str]) -> None:
        """Create the file with its header."""
        layout = FileLayout.of(tensors, metadata=metadata)
        self._starts = layout.starts
        self._left = set(tensors)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._write_at(0, memoryview(layout.header))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor from any device at its offset in the file."""
        data = _copied(tensor)
        self._left.remove(name)
        self._write_at(self._starts[name], data)

    @property
    def is_complete(self) -> bool:
        """True if all tensors were written."""
        return not self._left

    def close(self) -> None:
        """Fsync and close the file."""
        assert not self._left, f"not written: {', '.join(sorted(self._left))}"
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def abandon(self) -> None:
        """Close the incomplete file without fsync."""
        os.close(self._descriptor)

    def _write_at(self, position: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._descriptor, data, position)
            data, position = data[count:], position + count


def _copied(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on any device, copied unless the tensor is contiguous on the CPU."""
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous())
