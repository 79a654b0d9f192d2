"""Device that a job is planned for: a dry run computes on fake CPU tensors, with the block sizes of an accelerator."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RecordBlock = Callable[[], Callable[[int], bool]]
"""Function that a dry run provides to `each_block`. It starts a block and returns a function that ends the block.

The returned function receives the number of identical blocks that follow. If the block left the number of live bytes
unchanged, the function records the block that many times more, and returns True.
"""

_PLANS_ACCELERATOR = ContextVar("_PLANS_ACCELERATOR", default=False)
_RECORD_BLOCK: ContextVar[RecordBlock | None] = ContextVar("_RECORD_BLOCK", default=None)


def planned_accelerator() -> AbstractContextManager[None]:
    """Make `is_on_host` return False for all tensors in the body."""
    return _set(_PLANS_ACCELERATOR, True)


def is_on_host(tensor: "Tensor") -> bool:
    """Return True if a tensor is on the CPU or on `meta`, outside of `planned_accelerator`.

    Algorithms whose block sizes depend on the device call this function, so a dry run uses the block sizes of an
    accelerator.
    """
    return tensor.device.type in ("cpu", "meta") and not _PLANS_ACCELERATOR.get()


def each_block(num: int, size: int) -> Iterator[slice]:
    """Yield the slices of `range(num)` in blocks of `size`; the last block may be smaller.

    A dry run (`recorded_blocks`) skips repeated blocks: the first block that leaves the number of live bytes unchanged
    stands for all following blocks of equal size. So the body must run the same operators for every block of `size`.
    """
    record = _RECORD_BLOCK.get()
    start = 0
    while start < num:
        end = min(start + size, num)
        if record is None:
            yield slice(start, end)
        else:
            finish = record()
            yield slice(start, end)
            equal = (num - end) // size if end - start == size else 0
            if finish(equal):
                end += equal * size
        start = end


def recorded_blocks(record: RecordBlock) -> AbstractContextManager[None]:
    """Make `each_block` call `record` for each block during the body, and skip repeated blocks."""
    return _set(_RECORD_BLOCK, record)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Generator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
