"""Typed wrapper of `triton.jit`, whose own type does not cover kernel launches."""

from collections.abc import Callable
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """Triton kernel, as returned by `triton.jit`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a function that launches one program per point of the grid."""
        ...


def jit(kernel: Callable[..., Any]) -> Kernel:
    """Compile a function to a Triton kernel at its first launch."""
    launchable: Kernel = triton.jit(kernel)
    return launchable
