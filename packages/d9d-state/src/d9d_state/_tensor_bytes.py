"""The memory of a tensor as bytes, for the calls that read and write files."""

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read or written while the tensor is alive."""
    assert tensor.is_cpu, "expected a tensor on the CPU"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    # NumPy, which would give a buffer too, is optional for torch.
    size = tensor.numel() * tensor.dtype.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
