"""Safetensors writer that takes one tensor at a time, in any order, so that only one tensor is in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from d9d_state._tensor_bytes import bytes_of
from d9d_state.safetensors_layout import FileLayout
from d9d_state.tensor_info import TensorInfo


@final
class StreamedFile:
    """New safetensors file; complete and fsynced when `close` returns."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], *, metadata: Mapping[str, str]) -> None:
        """Create the file with its header."""
        layout = FileLayout.of(tensors, metadata=metadata)
        self._starts = layout.starts
        self._left = set(tensors)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._write_at(0, memoryview(layout.header))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor from any device at its offset in the file."""
        on_cpu = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        self._left.remove(name)
        self._write_at(self._starts[name], bytes_of(on_cpu))

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
