"""Typed wrapper of `triton.jit`, whose own type does not cover kernel launches, and properties of a device."""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import triton
from triton import knobs
from triton.runtime import driver


class Kernel(Protocol):
    """Triton kernel, as returned by `triton.jit`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a function that launches one program per point of the grid."""
        ...


def jit(kernel: Callable[..., Any]) -> Kernel:
    """Compile a function to a Triton kernel at its first launch."""
    launchable: Kernel = triton.jit(kernel)
    return launchable


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors (compute units) of a device; 1 for Triton's interpreter."""
    if knobs.runtime.interpret:
        return 1
    active: Any = driver.active  # the base class of drivers does not declare `utils`
    multiprocessors: int = active.utils.get_device_properties(device.index)["multiprocessor_count"]
    return multiprocessors


@cache
def threads_per_warp() -> int:
    """Return the number of threads per warp; 32 for Triton's interpreter."""
    if knobs.runtime.interpret:
        return 32
    warp_size: int = driver.active.get_current_target().warp_size
    return warp_size
