"""Device that a job is planned for: a dry run computes on fake CPU tensors, with the block sizes of an accelerator."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PLANS_ACCELERATOR = ContextVar("_PLANS_ACCELERATOR", default=False)


@contextmanager
def planned_accelerator() -> Generator[None]:
    """Make `is_on_host` return False for all tensors in the body."""
    before = _PLANS_ACCELERATOR.set(True)
    try:
        yield
    finally:
        _PLANS_ACCELERATOR.reset(before)


def is_on_host(tensor: "Tensor") -> bool:
    """Return True if a tensor is on the CPU or on `meta`, outside of `planned_accelerator`.

    Algorithms whose block sizes depend on the device ask this function, so that a dry run has those of the accelerator.
    """
    return tensor.device.type in ("cpu", "meta") and not _PLANS_ACCELERATOR.get()
