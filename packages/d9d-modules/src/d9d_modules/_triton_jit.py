"""`triton.jit` with a type: Triton's own knows nothing of how a kernel is launched."""

from collections.abc import Callable
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """A function that launches a program for each point of the grid."""
        ...


def jit(kernel: Callable[..., Any]) -> Kernel:
    """Make a kernel of a function."""
    launchable: Kernel = triton.jit(kernel)
    return launchable
