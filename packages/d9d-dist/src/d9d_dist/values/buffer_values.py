"""Copies of a model's buffers: state that forward passes and event handlers change, and that is not a parameter.

Running statistics, expert biases, token counters and codebooks are buffers. A call that must not change the training,
or that undoes a part of it, puts the values of all buffers back. Only this module lists which ones.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from d9d_dist.errors import check_choice
from d9d_dist.shards import local_tensor
from d9d_dist.values._model_tensors import Slot

Buffers: TypeAlias = Literal["all", "not saved"]
"""All buffers of a model, or only the non-persistent ones, which checkpoints omit."""

PLAIN = (bool, int, float, str, type(None))
_LARGE = 1 << 16  # bytes; smaller buffers are copied even if torch has not counted a write, such as one through `.data`
_NUM_CHECKS = 4  # the first comparisons may precede the first forward
_CHECKS: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()  # of large buffers; -1 if one changed uncounted


@dataclass(frozen=True, slots=True)
class _Kept:
    buffer: Tensor | None
    value: Tensor | None
    version: int
    plain: dict[str, Any]

    def is_current(self, now: Tensor | None) -> bool:
        """Return True if the copy is known to equal the buffer."""
        if now is None or self.value is None:
            return now is self.buffer
        is_counted = now is self.buffer and self.value.nbytes >= _LARGE and local_tensor(now)._version == self.version
        return is_counted and not _changes_uncounted(now, self.value)

    def pair_with(self, now: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the local part of a tensor and the copy if they have one shape and dtype; else None."""
        if now is None or self.value is None:
            return None
        local = local_tensor(now)
        return (local, self.value) if (local.shape, local.dtype) == (self.value.shape, self.value.dtype) else None


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: each for key, each in vars(module).items() if isinstance(each, PLAIN) and key != "training"}


def _changes_uncounted(buffer: Tensor, value: Tensor) -> bool:
    """Return True if a large buffer changes by writes that torch does not count. Its first copies are compared."""
    num, local = _CHECKS.get(buffer, 0), local_tensor(buffer)
    if 0 <= num < _NUM_CHECKS and type(local) is Tensor and not local.is_meta:
        num = _CHECKS[buffer] = num + 1 if torch.equal(local.to(value.device), value) else -1
    return num < 0


@final
class BufferValues:
    """Copies of the buffers of a model, which `restore` puts back into the same tensor objects. No collectives.

    A non-persistent buffer that a forward has replaced keeps its value if its shape or dtype changed, or numbers, flags
    or texts in attributes of its module: it is a cache, such as a table of rotary positions, which these describe.

    Args:
        model: Model on its device. Buffers of modules that are added later are not copied.
        which: Buffers to copy.
        device: Device of the copies; by default, that of each buffer.
    """

    def __init__(self, model: nn.Module, which: Buffers = "all", *, device: torch.device | None = None) -> None:
        check_choice("which", which, Buffers)
        self._device = device
        self._slots = [
            Slot(module, name)
            for module in model.modules()
            for name in module._buffers.keys()  # noqa: SIM118 - TorchScript has no iterator
            if which == "all" or name in module._non_persistent_buffers_set
        ]
        self._kept: dict[Slot, _Kept] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current values. Large buffers that were not written since the last call keep their copies."""
        for slot in self._slots:
            buffer, last = slot.get(), self._kept.get(slot)
            if last is None or not last.is_current(buffer):
                local = None if buffer is None else local_tensor(buffer.detach())
                value = None if local is None else local.to(self._device or local.device, copy=True)
                self._kept[slot] = _Kept(buffer, value, 0 if local is None else local._version, _plain(slot.module))

    def end_forward(self) -> list[Slot]:
        """Return the buffers that were written in place since, and drop the copies of large ones that were not."""
        self._kept = {slot: kept for slot, kept in self._kept.items() if not kept.is_current(slot.get())}
        found = [(slot, now, kept) for slot, kept in self._kept.items() if (now := slot.get()) is kept.buffer]
        return [slot for slot, now, kept in found if now is not None and local_tensor(now)._version != kept.version]

    def tensors(self) -> list[Tensor]:
        """Return the copies."""
        return [kept.value for kept in self._kept.values() if kept.value is not None]

    @torch.no_grad()
    def restore(self, *, unless: Tensor | None = None) -> None:
        """Put the copied values back.

        `unless` is a 0-dim bool tensor on the device of the model: where it is True, the current values are kept.
        Synchronizes the host only if a forward has replaced a buffer by one of another shape.
        """
        for slot, kept in self._kept.items():
            pair = kept.pair_with(now := slot.get())
            is_cache = now is not kept.buffer and slot.name in slot.module._non_persistent_buffers_set
            if kept.is_current(now) or (is_cache and (pair is None or _plain(slot.module) != kept.plain)):
                continue
            if unless is not None and pair is not None:
                pair[0].copy_(torch.where(unless, *pair))
                continue
            if unless is not None and unless:
                continue
            if kept.buffer is not None and kept.value is not None:
                local = local_tensor(kept.buffer)
                # Graphs that need a buffer stay valid: torch does not count writes to `.data`.
                (local.data if kept.value.nbytes < _LARGE else local).copy_(kept.value)
            if now is not kept.buffer:
                slot.module._buffers[slot.name] = kept.buffer
