"""A tensor's memory as a buffer for file reads and writes."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for a sparse tensor, and a subclass that holds its values in other tensors.

    A subclass such as a quantized state has no memory of its own: its data pointer is 0.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}); expected a dense tensor. Convert it: to_dense().")
    if is_traceable_wrapper_subclass(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, a tensor subclass that holds its values in other tensors, which "
            "cannot be saved; expected a torch.Tensor, or a DTensor of one. For optimizer state, use another optimizer."
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's bytes, which keeps the tensor alive."""
    check_memory("the tensor", tensor)
    assert tensor.is_cpu, "expected a tensor on the CPU"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    # Tensor.numpy() would give a buffer too, but NumPy is an optional dependency of torch.
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")
