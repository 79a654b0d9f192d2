"""Background saves: a thread that runs one save at a time, and a host buffer for copies of the tensors."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext
from d9d_state.errors import StateError

_LOGGER = logging.getLogger("d9d.state")
_ALIGNMENT = 64  # bytes; every dtype can be viewed at a multiple of this offset, and such copies are fastest


@final
class Background:
    """Thread for one task at a time. Logs an error at once; the next `start`, `wait` or `raise_if_failed` raises it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failure: StateError | None = None
        self._ctx: DistributedContext | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self, ctx: DistributedContext | None) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for the thread, or `None` for one process. Collective on the first call."""
        if ctx is None or ctx.world_size == 1:
            return None
        if ctx is not self._ctx:
            group = dist.new_group(backend="gloo", timeout=ctx.timeouts.step, group_desc="d9d_checkpoints")
            assert isinstance(group, dist.ProcessGroup), "this rank is not in the group of all ranks"
            self._ctx, self._group = ctx, group
        return self._group

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Wait for the previous task, raise its error if it was not raised yet, then start a new task."""
        self.wait()
        # Not a daemon thread: the interpreter waits for it at exit, so a started save is completed.
        self._thread = Thread(target=self._run, args=(what, work), name="d9d-checkpoint", daemon=False)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the `StateError` of a finished task, once. Does not wait."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the task; raise its `StateError` if it was not raised yet."""
        self.join()
        self.raise_if_failed()

    def join(self) -> None:
        """Wait for the task without raising its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        """True while the task is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if a task has failed and its error was not raised yet."""
        return self._failure is not None

    def _run(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any error is stored, to be raised in the calling thread
            _LOGGER.error("%s failed: %s", what, error)
            failure = error if isinstance(error, StateError) else StateError(f"{what} failed: {error}")
            if failure is not error:
                failure.__cause__ = error
            self._failure = failure


@final
class Staging:
    """Host buffer for the tensor parts that this rank writes; pinned if there is an accelerator."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._allocator: Thread | None = None

    def reserve(self, parts: Mapping[str, Tensor]) -> int:
        """Start to allocate the buffer in a thread: page faults in new memory take longer than the copy.

        Returns the required size in bytes.
        """
        self._wait()
        size = sum(_padded(part.nbytes) for part in parts.values())
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
            self._allocator = Thread(target=self._allocate, args=(size, device), name="d9d-staging", daemon=True)
            self._allocator.start()
        return size

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Start to copy a rank's tensor parts to the buffer, without host-device synchronization.

        The copies are on the current stream, so later work on it may change the parts. Returns views of the buffer,
        valid until the next call, and a function that waits until they are complete. Raises `MemoryError` if the buffer
        could not be allocated.
        """
        size = self.reserve(parts)
        self._wait()
        if self._buffer.numel() < size:
            raise MemoryError(f"could not allocate {size} bytes of host memory for the copy.")
        copies: dict[str, Tensor] = {}
        position = 0
        for key, part in parts.items():
            copies[key] = self._buffer[position : position + part.nbytes].view(part.dtype).view(part.shape)
            copies[key].copy_(part, non_blocking=True)
            position += _padded(part.nbytes)
        device = next((part.device for part in parts.values() if not part.is_cpu), None)
        if device is None:
            return copies, lambda: None
        copied_all = torch.Event(device)
        copied_all.record()
        return copies, copied_all.synchronize

    def _allocate(self, size: int, device: int | None) -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread would pin memory for device 0
        with suppress(RuntimeError, MemoryError):  # copy() raises if the buffer is too small
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).zero_()

    def _wait(self) -> None:
        if self._allocator is not None:
            self._allocator.join()
        self._allocator = None


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
