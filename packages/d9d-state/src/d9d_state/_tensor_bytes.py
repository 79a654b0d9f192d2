"""A tensor's memory as a buffer for file reads and writes."""

import ctypes
from typing import Any

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's bytes, which keeps the tensor alive."""
    assert tensor.is_cpu, "expected a tensor on the CPU"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    # Tensor.numpy() would give a buffer too, but NumPy is an optional dependency of torch.
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")
