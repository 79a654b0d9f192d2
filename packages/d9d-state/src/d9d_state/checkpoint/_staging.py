"""Reusable host buffer for background saves: training continues while the copied tensors are written."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import final

import torch
from torch import Tensor

from d9d_state.checkpoint.save_plan import Part, SavePlan, part_key

_ALIGNMENT = 64  # bytes; every dtype can be viewed at a multiple of this offset, and such copies are fastest


@final
class Staging:
    """Host buffer for the tensor parts that this rank writes; pinned if there is an accelerator."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._allocator: Thread | None = None

    def reserve(self, plan: SavePlan, rank: int) -> None:
        """Start to allocate the buffer for a plan in a thread: page faults in new memory take longer than the copy."""
        self._wait()
        size = _num_bytes_of(plan, rank)
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
            self._allocator = Thread(target=self._allocate, args=(size, device), name="d9d-staging", daemon=True)
            self._allocator.start()

    @torch.no_grad()
    def copy(
        self, parts: Mapping[str, Tensor], plan: SavePlan, rank: int
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Start to copy a rank's tensor parts to the buffer, without host-device synchronization.

        The copies are on the current stream, so later work on it may change the parts.

        Returns:
            Views of the buffer, valid until the next call, and a function that waits until they are complete.

        Raises:
            MemoryError: If the buffer could not be allocated.
        """
        self.reserve(plan, rank)
        self._wait()
        if self._buffer.numel() < _num_bytes_of(plan, rank):
            raise MemoryError(f"could not allocate {_num_bytes_of(plan, rank)} bytes of host memory for the copy.")
        copies: dict[str, Tensor] = {}
        position = 0
        for part in plan.parts[rank]:
            source = parts[part_key(*part)]
            size = _num_bytes(plan, part)
            copies[part_key(*part)] = self._buffer[position : position + size].view(source.dtype).view(source.shape)
            position += _padded(size)
        for key, copied in copies.items():
            copied.copy_(parts[key], non_blocking=True)
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


def _num_bytes_of(plan: SavePlan, rank: int) -> int:
    return sum(_padded(_num_bytes(plan, part)) for part in plan.parts[rank])


def _num_bytes(plan: SavePlan, part: Part) -> int:
    name, region = part
    return region.num_elements * plan.tensors[name].dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
