"""Buckets of gradients, each reduced by one all-reduce. Used by `d9d_dist.gradients.gradient_sync`."""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from d9d_dist.gradients._local_parameters import PartialParameter
from d9d_dist.gradients.grad_dtype import grad_dtype_of

_GROUP_NAME = "gradient_sync"


@final
class Slot:
    """State of one parameter's gradient in a bucket.

    Attributes:
        placements: Placements of the gradient before the reduction.
        ranks: Ranks that sum the gradient, in ascending order; includes this rank.
        reduced: Placements of the gradient after the reduction.
        dtype: dtype of the gradient.
        wire_dtype: dtype of the all-reduce.
        shape: Local shape of the gradient.
        before: Reduced gradient in `.grad` before the step, or `None`.
        is_used: True if this rank has computed a gradient in this step.
    """

    def __init__(self, found: PartialParameter, dtype: torch.dtype | None) -> None:
        self.parameter = found.parameter
        self.placements = found.placements
        self.ranks = _ranks(found.parameter, found.placements)
        self.reduced = tuple(Replicate() if p.is_partial() else p for p in found.placements)
        self.dtype = grad_dtype_of(found.parameter)
        self.wire_dtype = dtype or found.reduce_dtype or self.dtype
        self.shape = found.parameter.to_local().shape
        self.num_received = 0
        self.before: torch.Tensor | None = None
        self.is_used = False

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.wire_dtype.itemsize

    def set_aside(self) -> None:
        """Move a reduced gradient from `.grad` to `before`: partial gradients cannot be added to a reduced one."""
        present = self.parameter.grad
        if present is not None and not is_partial(present):
            self.before = present if self.before is None else self.before + present
            self.parameter.grad = None

    def take(self) -> torch.Tensor | None:
        """Move this rank's partial gradient out of `.grad`, as a contiguous local tensor; `None` if there is none."""
        gradient = self.parameter.grad
        if gradient is None or not is_partial(gradient):
            if gradient is not None:
                self.set_aside()
            return None
        assert isinstance(gradient, DTensor)
        assert gradient.placements == self.placements, "the gradient's placements differ from those of its parameter"
        self.parameter.grad = None
        self.is_used = True
        return gradient.to_local().contiguous()

    def give(self, local: torch.Tensor) -> None:
        """Set `.grad` to the reduced gradient plus `before`."""
        spread = self.parameter
        total = DTensor.from_local(
            local, spread.device_mesh, self.reduced, run_check=False, shape=spread.shape, stride=spread.stride()
        )
        self.parameter.grad = total if self.before is None else total.add_(self.before)

    def reset(self) -> None:
        self.num_received, self.before, self.is_used = 0, None, False


@final
class Bucket:
    """Gradients that one asynchronous all-reduce reduces."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.num_ready = 0
        self.group = _group(slots[0].ranks)
        self._buffer: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_ready(self) -> bool:
        return self.num_ready == len(self.slots)

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-reduce without waiting for it."""
        self._buffer = self._pack([slot.take() for slot in self.slots])
        self._work = dist.all_reduce(self._buffer, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self, is_used: Sequence[bool]) -> None:
        """Wait for the all-reduce, set the parameters' gradients, and reset the bucket for the next step.

        `is_used` is True for each slot whose gradient any rank has computed. Other parameters get their previous
        gradient.
        """
        assert self._buffer is not None
        assert self._work is not None
        self._work.wait()
        total = self._buffer.to(self.slots[0].dtype)
        for slot, local, used in zip(self.slots, self._views(total), is_used, strict=True):
            if used:
                slot.give(local)
            else:
                slot.parameter.grad = slot.before
            slot.reset()
        self._buffer, self._work, self.num_ready = None, None, 0

    def _pack(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return a flat tensor of all gradients, zeros for missing ones. A single gradient is not copied."""
        first, dtype = parts[0], self.slots[0].wire_dtype
        if len(parts) == 1 and first is not None and first.dtype == dtype:
            return first.view(-1)
        device = self.slots[0].parameter.device
        buffer = torch.empty(sum(slot.shape.numel() for slot in self.slots), dtype=dtype, device=device)
        pairs = list(zip(self._views(buffer), parts, strict=True))
        filled = [(view, part) for view, part in pairs if part is not None]
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [part for _, part in filled])
        if len(filled) < len(parts):
            torch._foreach_zero_([view for view, part in pairs if part is None])
        return buffer

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor in the local shapes of the gradients."""
        parts = buffer.split([slot.shape.numel() for slot in self.slots])
        return [part.view(slot.shape) for part, slot in zip(parts, self.slots, strict=True)]


def plan_buckets(slots: Sequence[Slot], *, bucket_bytes: int) -> list[list[Slot]]:
    """Assign gradients to buckets, from the last parameter to the first: the order in which backward completes them.

    Gradients of a bucket have the same ranks and dtypes and at most `bucket_bytes` in total; a larger gradient has a
    bucket of its own. The result depends only on parameter metadata, so it is equal on all ranks that reduce together.
    """
    closed: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    for index in reversed(range(len(slots))):
        slot = slots[index]
        if slot.num_bytes >= bucket_bytes:
            closed.append([index])
            continue
        key = (slot.ranks, slot.wire_dtype, slot.dtype)
        bucket, num_bytes = filling.get(key, ([], 0))
        if num_bytes + slot.num_bytes > bucket_bytes:
            closed.append(bucket)
            bucket, num_bytes = [], 0
        bucket.append(index)
        filling[key] = (bucket, num_bytes + slot.num_bytes)
    closed.extend(bucket for bucket, _ in filling.values())
    closed.sort(key=lambda bucket: -bucket[-1])
    return [[slots[index] for index in bucket] for bucket in closed]


def is_partial(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def _ranks(parameter: DTensor, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the ranks that differ from this rank only on axes with a partial placement, in ascending order."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    index = tuple(
        slice(None) if placement.is_partial() else place
        for placement, place in zip(placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the gradient process group of these ranks; create it if torch's registry lacks it."""
    for group, members in dist.distributed_c10d._world.pg_group_ranks.items():
        if isinstance(group, dist.ProcessGroup) and group.group_desc == _GROUP_NAME and tuple(sorted(members)) == ranks:
            return group
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=_GROUP_NAME)
    assert isinstance(group, dist.ProcessGroup)
    return group
