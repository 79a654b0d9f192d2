"""Reusable host buffer for background saves: training continues while the copied tensors are written."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import final

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; every dtype can be viewed at a multiple of this offset, and such copies are fastest


@final
class Staging:
    """Host buffer for the tensor parts that this rank writes; pinned if there is an accelerator."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._allocator: Thread | None = None

    def reserve(self, parts: Mapping[str, Tensor]) -> None:
        """Start to allocate the buffer in a thread: page faults in new memory take longer than the copy."""
        self._wait()
        size = _num_bytes_of(parts)
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
            self._allocator = Thread(target=self._allocate, args=(size, device), name="d9d-staging", daemon=True)
            self._allocator.start()

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Start to copy a rank's tensor parts to the buffer, without host-device synchronization.

        The copies are on the current stream, so later work on it may change the parts.

        Returns:
            Views of the buffer, valid until the next call, and a function that waits until they are complete.

        Raises:
            MemoryError: If the buffer could not be allocated.
        """
        self.reserve(parts)
        self._wait()
        if self._buffer.numel() < _num_bytes_of(parts):
            raise MemoryError(f"could not allocate {_num_bytes_of(parts)} bytes of host memory for the copy.")
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


def _num_bytes_of(parts: Mapping[str, Tensor]) -> int:
    return sum(_padded(part.nbytes) for part in parts.values())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
