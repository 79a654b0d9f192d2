"""Host memory that a save copies to, so that training goes on while it is written: made once and used again."""

from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import final

import torch
from torch import Tensor

from d9d_state.checkpoint.save_plan import Part, SavePlan, part_key

_ALIGNMENT = 64  # bytes: any dtype can be viewed there, and copies are fastest


@final
class Staging:
    """One buffer for all that this rank writes; pinned where there is an accelerator."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._maker: Thread | None = None

    def reserve(self, plan: SavePlan, rank: int) -> None:
        """Begin to make room for a plan, in a thread: a system hands memory out page by page, slower than a copy."""
        self._wait()
        size = _num_bytes_of(plan, rank)
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # not both at once
            device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
            self._maker = Thread(target=self._make, args=(size, device), name="d9d-staging", daemon=True)
            self._maker.start()

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Tensor], plan: SavePlan, rank: int) -> dict[str, Tensor]:
        """Copies of a rank's parts of tensors, which last until the next call. When this returns they are done.

        Args:
            parts: What the rank writes, on any device.
            plan: Which says so.
            rank: This rank.
        """
        self.reserve(plan, rank)
        self._wait()
        if self._buffer.numel() < _num_bytes_of(plan, rank):
            raise MemoryError(f"there is no room for a copy of {_num_bytes_of(plan, rank)} bytes in host memory.")
        copies: dict[str, Tensor] = {}
        position = 0
        for part in plan.parts[rank]:
            source = parts[part_key(*part)]
            size = _num_bytes(plan, part)
            copies[part_key(*part)] = self._buffer[position : position + size].view(source.dtype).view(source.shape)
            position += _padded(size)
        for key, copied in copies.items():
            copied.copy_(parts[key], non_blocking=True)
        if any(not part.is_cpu for part in parts.values()):
            torch.accelerator.synchronize()
        return copies

    def _make(self, size: int, device: int | None) -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a thread starts with the first one, and would pin for that
        with suppress(RuntimeError, MemoryError):  # whoever copies finds that there is no buffer
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device is not None).zero_()

    def _wait(self) -> None:
        if self._maker is not None:
            self._maker.join()
        self._maker = None


def _num_bytes_of(plan: SavePlan, rank: int) -> int:
    return sum(_padded(_num_bytes(plan, part)) for part in plan.parts[rank])


def _num_bytes(plan: SavePlan, part: Part) -> int:
    name, box = part
    return box.num_elements * plan.tensors[name].dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
