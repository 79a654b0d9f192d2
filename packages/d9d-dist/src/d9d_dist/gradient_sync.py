"""Adds gradients up over ranks, in buckets, while backward still computes: `Partial()` becomes `Replicate()`.

A parameter's placements say which ranks have a part of its gradient, so there is nothing to configure: data-parallel
replicas and norms inside tensor-parallel regions are reduced alike, over several axes at once where it takes several.
What FSDP manages FSDP reduces; ranks that used different parameters are reconciled by `d9d_dist._unused_parameters`.

Bucketing and overlap follow "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
arXiv:2006.15704, without its copy back: a reduced gradient stays where it was reduced.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist._gradient_buckets import Bucket, Slot, is_partial, plan_buckets
from d9d_dist._local_parameters import PartialParameter, modules_outside_fsdp, partial_parameters
from d9d_dist._unused_parameters import UnusedParameters
from d9d_dist.errors import UserError

BUCKET_BYTES = 4 * 2**20
"""Enough to use a network well, and little enough that most weights of a large model are reduced without a copy."""


@final
class GradientSync:
    """Reduces the gradients of a model that are parts of sums, once a step.

    Every backward adds a microbatch's gradients up locally. With the last one gradients become final, from the last
    layers to the first; a bucket whose gradients are all there starts its all-reduce at once, without waiting for it.
    `finish` starts what is left, and waits. All ranks reduce the same buckets in the same order, each gradient once.

    Between the first microbatch and `finish`, gradients are in no state to be looked at. After it:

    - `.grad` is a DTensor with the placements of its parameter; those of one bucket share their memory.
    - A parameter that some rank used has a gradient on all ranks. One that none used has what it had before: usually
      none, so optimizers pass over it. (A rank that lacks a gradient has to ask; only then does its host wait for the
      device.) The same holds for parameters that FSDP manages. A module that `parallelize_hsdp` was called on runs on
      all ranks or on none, since FSDP gathers its parameters; what is inside may differ.
    - If `.grad` was not set to `None` before the step, the sum is added to what was there.

    Making one is collective over the ranks of each gradient's axes: it makes process groups, of its own, so that its
    all-reduces cannot get between other collectives. Make it when parameters are in their final place: parallelised,
    and filled by `materialize`.

    Attributes:
        num_microbatches: Number of backward passes of a step. May be set anew between steps. None if it is not known
            how often a gradient is added to, as where backward is split: then nothing is reduced before `finish`.

    Args:
        model: A model, or one stage of it.
        num_microbatches: See the attribute.
        bucket_bytes: Smaller gradients are copied into buckets of this size; larger ones are reduced alone, in place.
        dtype: What to reduce in; by default what `parallelize_replicate` was given, else the gradient's own.

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
        self._unplanned = [parameter for parameter in _spread_outside_fsdp(model) if id(parameter) not in planned]
        self._unused = UnusedParameters(model)
        self._num_started = 0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for number, bucket in enumerate(self._buckets):
            for place, slot in enumerate(bucket.slots):
                set_aside, receive = (_weak(method, number, place) for method in (self._set_aside, self._receive))
                self._handles.append(slot.parameter.register_hook(set_aside))
                self._handles.append(slot.parameter.register_post_accumulate_grad_hook(receive))

    def finish(self) -> None:
        """Reduce what backward has not reduced yet, wait, and leave every gradient whole.

        Gradients that are `Partial()` though their module does not compute with local parameters, such as those that
        torch's own tensor-parallel styles leave, are reduced here too. They must be there on all ranks of their axes
        or on none.
        """
        unplanned = self._plan(_partial_gradients(self._unplanned))
        for bucket in [*self._buckets[self._num_started :], *unplanned]:
            bucket.start()
        buckets = [*self._buckets, *unplanned]
        for bucket, is_used in zip(buckets, _used_by_any(buckets), strict=True):
            bucket.finish(is_used)
        self._unused.finish()
        self._num_started = 0

    def close(self) -> None:
        """Take the hooks off the parameters; after the last `finish`. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unused.close()

    def _plan(self, parameters: Iterable[PartialParameter]) -> list[Bucket]:
        slots = [Slot(parameter, self._dtype) for parameter in parameters]
        return [Bucket(group) for group in plan_buckets(slots, bucket_bytes=self._bucket_bytes)]

    def _set_aside(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """A gradient is about to be added to `.grad`."""
        self._buckets[number].slots[place].set_aside(gradient)

    def _receive(self, number: int, place: int, parameter: torch.Tensor) -> None:
        """A gradient has been added to `.grad`."""
        bucket = self._buckets[number]
        slot = bucket.slots[place]
        slot.num_received += 1
        if self.num_microbatches is None:
            return
        if slot.num_received > self.num_microbatches:
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} received gradient number {slot.num_received} of a step "
                f"of num_microbatches = {self.num_microbatches}; expected GradientSync.finish() before the next step. "
                "Call it, or set num_microbatches to the number of backward passes before it."
            )
        if slot.num_received == self.num_microbatches:
            bucket.num_ready += 1
            while self._num_started < len(self._buckets) and self._buckets[self._num_started].is_ready:
                self._buckets[self._num_started].start()
                self._num_started += 1


def sync_gradients(model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None) -> None:
    """Add the gradients of a model up over ranks, for a loop that has run all its backward passes; see `GradientSync`.

    Args:
        model: A model, or one stage of it.
        bucket_bytes: See `GradientSync`.
        dtype: What to reduce in.
    """
    sync = GradientSync(model, bucket_bytes=bucket_bytes, dtype=dtype)
    try:
        sync.finish()
    finally:
        sync.close()


def _weak(method: Callable[..., None], *args: Any) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the method's object alive: Python finds no reference cycles through tensors' hooks."""
    reference = WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(*args, tensor)

    return hook


def _used_by_any(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Which parameters some rank has used, by bucket: one small all-reduce for each group."""
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
        # What this rank used needs no answer, and reading the answer would wait for the device.
        numbers = counts.tolist() if missing else [1] * len(slots)
        used.update(id(slot) for slot, number in zip(slots, numbers, strict=True) if number)
    return [[id(slot) in used for slot in bucket.slots] for bucket in buckets]


def _spread_outside_fsdp(model: nn.Module) -> Iterable[DTensor]:
    """The parameters outside FSDP's care that are placed on a mesh, each once."""
    modules = modules_outside_fsdp(model)
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return {id(parameter): parameter for parameter in parameters if isinstance(parameter, DTensor)}.values()


def _partial_gradients(parameters: Iterable[DTensor]) -> Iterator[PartialParameter]:
    """Those whose gradients are parts of sums."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor) and is_partial(parameter.grad):
            yield PartialParameter(parameter, parameter.grad.placements, None)
