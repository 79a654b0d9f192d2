"""Header and byte offsets of a safetensors file, computed from shapes and dtypes only."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

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
        start = 8 + len(text)
        return cls(
            struct.pack("<Q", len(text)) + text,
            {name: start + offset for name, offset in offsets.items()},
            start + end,
        )
