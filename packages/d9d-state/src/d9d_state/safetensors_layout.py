"""Where each tensor of a safetensors file goes, and the header that says so, before a tensor is there."""

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
    """The plan of a file.

    Attributes:
        header: The first bytes of the file.
        starts: For each tensor the position of its first byte in the file, in the order in which they lie.
        num_bytes: The size of the file.
    """

    header: bytes
    starts: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], *, metadata: Mapping[str, str] | None = None) -> Self:
        """Lay tensors out.

        Args:
            tensors: All that the file will hold.
            metadata: Texts for the header's `__metadata__`.

        Raises:
            ValueError: If a dtype has no place in the format.
        """
        # The format wants every tensor aligned to its item size, so those with larger items come first.
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
                f"got {len(tensors)} tensors for one file, whose header would have {len(text)} bytes, more than the "
                f"{MAX_HEADER_BYTES} that are read; write several files."
            )
        start = 8 + len(text)
        return cls(
            struct.pack("<Q", len(text)) + text,
            {name: start + offset for name, offset in offsets.items()},
            start + end,
        )
