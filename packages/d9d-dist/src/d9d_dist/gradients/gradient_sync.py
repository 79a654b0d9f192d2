"""Reduction of gradients over ranks in buckets, overlapped with backward: `Partial()` becomes `Replicate()`.

A parameter's placements define which ranks have a part of its gradient, so no configuration is needed. Gradients of
data-parallel replicas and of norms inside tensor-parallel regions are reduced alike, over several axes at once if
needed. FSDP reduces the gradients of its own parameters; `_unused_parameters.py` handles ranks that use different
parameters.

Bucketing and overlap follow "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv:2006.15704, without the copy back: reduced gradients are views of their bucket.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist.errors import UserError
from d9d_dist.gradients._gradient_buckets import Bucket, Slot, is_partial, plan_buckets
from d9d_dist.gradients._local_parameters import PartialParameter, modules_outside_fsdp, partial_parameters
from d9d_dist.gradients._unused_parameters import UnusedParameters

BUCKET_BYTES = 4 * 2**20
"""Default bucket size. Larger weights, i.e. most weights of a large model, are reduced without a copy."""


@final
class GradientSync:
    """Reduction of a model's partial gradients over ranks, once per step.

    Every backward accumulates a microbatch's gradients locally. In the last backward gradients become final, from the
    last layers to the first. A bucket starts its asynchronous all-reduce once all its gradients are final. `finish`
    starts the remaining buckets and waits. All ranks reduce the same buckets in the same order, each gradient once.

    Gradients are undefined between the first microbatch and `finish`. After `finish`:

    - `.grad` is a DTensor with the placements of its parameter. Gradients of one bucket share their memory.
    - A parameter that any rank used has a gradient on all ranks. A parameter that no rank used has its previous
      gradient: usually `None`, so optimizers skip it. Only ranks that lack a gradient synchronize host and device. The
      same holds for FSDP parameters. But a module that was passed to `parallelize_hsdp` must run on all ranks or on
      none, because FSDP all-gathers its parameters; its submodules may differ.
    - If `.grad` was not `None` before the step, the sum is added to it.

    Construction is collective over the ranks of each gradient's axes: it creates separate process groups, whose
    all-reduces do not interleave with other collectives. Construct it after the model is parallelized and filled by
    `materialize`.

    Attributes:
        num_microbatches: Number of backward passes per step; may be changed between steps. With `None`, e.g. for split
            backward passes, nothing is reduced before `finish`.

    Args:
        model: A model, or one stage of it.
        bucket_bytes: Bucket size in bytes. Smaller gradients are copied into buckets; a larger gradient is reduced in
            place, without a copy.
        dtype: dtype of the reduction. Default: `Precision.reduce` of the parallelization, else the gradient's dtype.

    Raises:
        UserError: If `num_microbatches` or `bucket_bytes` is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_microbatches: int | None = 1,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bucket_bytes < 1 or (num_microbatches is not None and num_microbatches < 1):
            raise UserError(
                f"got num_microbatches = {num_microbatches} and bucket_bytes = {bucket_bytes}; expected both to be at "
                "least 1."
            )
        self.num_microbatches = num_microbatches
        self._model, self._bucket_bytes, self._dtype = model, bucket_bytes, dtype
        self._buckets = self._plan(partial_parameters(model))
        planned = {id(slot.parameter) for bucket in self._buckets for slot in bucket.slots}
        self._unplanned = [parameter for parameter in _dtensors_outside_fsdp(model) if id(parameter) not in planned]
        self._unused = UnusedParameters(model)
        self._num_started = 0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for number, bucket in enumerate(self._buckets):
            for place, slot in enumerate(bucket.slots):
                set_aside, receive = (_weak(method, number, place) for method in (self._set_aside, self._receive))
                self._handles.append(slot.parameter.register_hook(set_aside))
                self._handles.append(slot.parameter.register_post_accumulate_grad_hook(receive))

    def finish(self) -> None:
        """Reduce the remaining gradients, and wait for all reductions.

        Also reduces `Partial()` gradients of modules without local-parameter hooks, such as those of torch's own
        tensor-parallel styles. Such a gradient must exist on all ranks of its axes or on none.
        """
        partial = [
            PartialParameter(parameter, gradient.placements, None)
            for parameter in self._unplanned
            if isinstance(gradient := parameter.grad, DTensor) and is_partial(gradient)
        ]
        unplanned = self._plan(partial) if partial else []
        for bucket in [*self._buckets[self._num_started :], *unplanned]:
            bucket.start()
        if buckets := [*self._buckets, *unplanned]:
            for bucket, is_used in zip(buckets, _used_by_any(buckets), strict=True):
                bucket.finish(is_used)
        self._unused.finish()
        self._num_started = 0

    def close(self) -> None:
        """Remove the hooks from the parameters, after the last `finish`. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unused.close()

    def _plan(self, parameters: Iterable[PartialParameter]) -> list[Bucket]:
        slots = [Slot(parameter, self._dtype) for parameter in parameters]
        return [Bucket(group) for group in plan_buckets(slots, bucket_bytes=self._bucket_bytes)]

    def _set_aside(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """Handle a gradient before it is accumulated into `.grad`."""
        self._buckets[number].slots[place].set_aside()

    def _receive(self, number: int, place: int, parameter: torch.Tensor) -> None:
        """Handle a gradient after it was accumulated into `.grad`."""
        bucket = self._buckets[number]
        slot = bucket.slots[place]
        slot.num_received += 1
        if self.num_microbatches is None:
            return
        if slot.num_received > self.num_microbatches:
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} received gradient number {slot.num_received} of a step "
                f"of num_microbatches = {self.num_microbatches}; expected GradientSync.finish() before the "
                "next step. Call it, or set num_microbatches to the number of backward passes before each call."
            )
        if slot.num_received == self.num_microbatches:
            bucket.num_ready += 1
            while self._num_started < len(self._buckets) and self._buckets[self._num_started].is_ready:
                self._buckets[self._num_started].start()
                self._num_started += 1


def sync_gradients(model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum the gradients of a model over ranks, after all backward passes of a step; see `GradientSync`."""
    sync = GradientSync(model, bucket_bytes=bucket_bytes)
    try:
        sync.finish()
    finally:
        sync.close()


def _weak(method: Callable[..., None], *args: Any) -> Callable[[torch.Tensor], None]:
    """Return a hook with a weak reference to the method: Python cannot collect cycles through tensor hooks."""
    reference = WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(*args, tensor)

    return hook


def _used_by_any(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Return, by bucket, which parameters any rank has used. Collective: one small all-reduce per group."""
    by_group: dict[dist.ProcessGroup, list[Slot]] = {}
    for bucket in buckets:
        by_group.setdefault(bucket.group, []).extend(bucket.slots)
    used: set[int] = set()
    for group, slots in by_group.items():
        counts = torch.ones(len(slots), dtype=torch.int32, device=slots[0].parameter.device)
        missing = [index for index, slot in enumerate(slots) if not slot.is_used]
        for index in missing:
            counts[index].zero_()
        dist.all_reduce(counts, group=group)
        # Reading the counts is a host-device synchronization. A rank that used all parameters does not need them.
        numbers = counts.tolist() if missing else [1] * len(slots)
        used.update(id(slot) for slot, number in zip(slots, numbers, strict=True) if number)
    return [[id(slot) in used for slot in bucket.slots] for bucket in buckets]


def _dtensors_outside_fsdp(model: nn.Module) -> Iterable[DTensor]:
    """Return the DTensor parameters that FSDP does not manage, each once."""
    modules = modules_outside_fsdp(model)
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return {id(parameter): parameter for parameter in parameters if isinstance(parameter, DTensor)}.values()
