"""Record of a step without values: operators with FLOPs and bytes, collectives, and bytes of live tensors.

`StepRecorder` is a dispatch mode. It works on real and on fake tensors, so the same code records a dry run and a real
run. Lists that the host reads from fake tensors are zeros; `DryRunMode` answers reads of numbers.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist.planned_device import recorded_blocks
from d9d_dist.split_backward import DeferredWeightGrads
from d9d_loop.model.operator_flops import flop_formula
from d9d_loop.planning.collective_log import COLLECTIVE_NAMESPACES, Collective, collective_of, tensors_in
from d9d_loop.planning.dry_run_mode import values_of


@dataclass(frozen=True, slots=True)
class Operation:
    """Operator call that computes.

    Attributes:
        name: torch's name of the operator, without overload.
        flops: Floating-point operations of matrix products and attention; 0 for other operators.
        num_bytes: Bytes of all inputs and outputs, each counted once.
        shapes: Shapes of the tensor arguments.
        results: Shapes of the tensor results.
        is_recomputed: True if activation checkpointing reruns the operator in the backward pass.
    """

    name: str
    flops: int
    num_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...] = ()
    is_recomputed: bool = False


@final
@dataclass(slots=True)
class StepRecord:
    """Operators, collectives and memory of a step on one rank.

    Attributes:
        operations: Operator calls that compute, in order. Views and allocations are excluded.
        collectives: Collectives, in order.
        peak_bytes: Largest sum of the bytes of storages that were allocated in the step and alive at the same time.
    """

    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    peak_bytes: int = 0

    def collective_bytes(self) -> Counter[tuple[str, int]]:
        """Return the bytes by name of the collective and group size."""
        totals: Counter[tuple[str, int]] = Counter()
        for each in self.collectives:
            totals[each.name, len(each.ranks)] += each.num_bytes
        return totals


@final
class RepeatMarks:
    """Marks of one repeated block of layers, which the record counts once more for each dropped block.

    Args:
        num_dropped: Number of repeated blocks that the dry run's model lacks.
    """

    def __init__(self, num_dropped: int) -> None:
        self.num_dropped, self.is_repeat = num_dropped, False
        self.recorder: StepRecorder | None = None
        self._shares: dict[int, float] = {}

    def set(self, *, is_repeat: bool) -> None:
        """Start a part of the step; `is_repeat` is True if it belongs to the repeat, which may have several layers."""
        if self.recorder is not None and not (is_repeat and self.is_repeat):
            self.recorder.end_part()
        self.is_repeat = is_repeat

    def add_state(self, tensors: Iterable[Tensor]) -> None:
        """Assign these tensors, and memory that the update derives from them, to the repeat."""
        for tensor in tensors:
            self._set_share(tensor, 1.0)

    def share(self, tensor: Tensor) -> float:
        """Return the fraction of a tensor's bytes that belongs to the repeat, from `add_state` and `derive`."""
        if not self._shares:
            return 0.0
        return self._shares.get(_storage_of(tensor)._cdata, 0.0)

    def _set_share(self, tensor: Tensor, share: float) -> None:
        storage = _storage_of(tensor)
        if storage._cdata not in self._shares:
            if share == 0:
                return
            weakref.finalize(storage, self._shares.pop, storage._cdata)  # a later storage may have the same address
        self._shares[storage._cdata] = share

    def derive(self, result: Any, args: Any, *, joins: bool) -> None:
        """Set the shares of an operator's results. In a list, a result has the share of the inputs at its index."""
        if not self._shares:
            return
        if isinstance(result, list | tuple):
            lists = [each for each in args if isinstance(each, list | tuple)]
            for index, each in enumerate(result):
                self.derive(each, [inputs[index] for inputs in lists if index < len(inputs)], joins=False)
        elif isinstance(result, Tensor):
            shares = [self.share(tensor) for tensor in tensors_in(args)]
            share = fmean(shares) if joins else max(shares, default=0.0)
            # A number that is derived from all layers, such as the gradient norm, exists once.
            self._set_share(result, share if result.dim() or share == 1 else 0.0)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of an operator that the recorder needs at each call."""

    name: str
    is_view: bool
    joins: bool
    may_communicate: bool
    computes: bool
    count_flops: Callable[..., Any] | None


@cache
def _kind(func: Any) -> _Kind:
    namespace, _, name = func._schema.name.partition("::")
    return _Kind(
        name=name,
        is_view=func.is_view and not _may_copy(func),
        joins=namespace == "aten" and name in ("cat", "stack"),
        may_communicate=namespace in COLLECTIVE_NAMESPACES,
        computes=not func.is_view
        and namespace not in ("c10d", "_c10d_functional", "prim")
        and not name.startswith(("empty", "new_empty", "detach", "alias")),
        count_flops=flop_formula(func.overloadpacket),
    )


def _may_copy(func: Any) -> bool:
    """Return True for operators such as `reshape`, which return a view or a copy."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_recomputed() -> bool:
    """Return True during recomputation: a backward pass runs, with gradients enabled and a hook for saved tensors."""
    return (
        torch._C._current_graph_task_id() != -1
        and torch.is_grad_enabled()
        and _top_saved_tensors_default_hooks(True) is not None
    )


@final
class StepRecorder(TorchDispatchMode):
    """Dispatch mode that fills a `StepRecord`. `DryRunMode` is optional; enter it before this mode.

    Attributes:
        record: The recorded step.
    """

    def __init__(self, marks: RepeatMarks) -> None:
        super().__init__()
        self.record = StepRecord()
        self._marks = marks
        self._live: dict[int, int] = {}
        self._total = self._part_peak = 0
        self._part_start = (0, 0, 0)

    def start_block(self) -> Callable[[int], bool]:
        """Start a block of `each_block`; return a function that ends it and records identical blocks."""
        start = self._place()

        def end(num_equal: int) -> bool:
            if self._total != start[0]:
                return False
            self._repeat(start, num_equal)
            return True

        return end

    def end_part(self) -> None:
        """End a part of the step. If the part belongs to the repeat, also count it for the dropped repeats."""
        dropped = self._marks.num_dropped
        if self._marks.is_repeat and dropped:
            grown = dropped * (self._total - self._part_start[0])
            self._repeat(self._part_start, dropped)
            self._total += grown
            self.record.peak_bytes = max(self.record.peak_bytes, self._part_peak + grown)
        self._part_start, self._part_peak = self._place(), self._total

    def _place(self) -> tuple[int, int, int]:
        return self._total, len(self.record.operations), len(self.record.collectives)

    def _repeat(self, start: tuple[int, int, int], times: int) -> None:
        self.record.operations += self.record.operations[start[1] :] * times
        self.record.collectives += self.record.collectives[start[2] :] * times

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = _kind(func)
        self._marks.derive(result, args, joins=kind.joins)
        if kind.is_view:  # allocates nothing
            return result
        inputs, outputs = tensors_in(args, kwargs), tensors_in(result)
        collective = collective_of(func, args, kwargs, result) if kind.may_communicate else None
        if collective is not None:
            self.record.collectives.append(collective)
        elif kind.computes:
            flops = 0
            if kind.count_flops is not None:
                flops = self._counted(int(kind.count_flops(*args, **kwargs, out_val=result)), outputs[0])
            self._add(kind.name, flops, inputs, outputs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in outputs:
            self._track(leaf, known)
        return result

    def _add(self, name: str, flops: int, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in (*tensors, *outputs)}
        num_bytes = sum(self._counted(tensor.numel() * tensor.element_size(), tensor) for tensor in unique.values())
        shapes = (tuple(tuple(tensor.shape) for tensor in each) for each in (tensors, outputs))
        self.record.operations.append(Operation(name, flops, num_bytes, *shapes, is_recomputed=_is_recomputed()))

    def _counted(self, number: int, tensor: Tensor) -> int:
        """Scale a tensor's bytes or FLOPs to the full model: each dropped repeat adds its part of them."""
        return round(number * (1 + self._marks.num_dropped * self._marks.share(tensor)))

    def _track(self, tensor: Tensor, known: Container[int]) -> None:
        """Count the memory of a result, unless it is shared with an input that was allocated before the record."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            if key in known:
                return
            weakref.finalize(storage, self._free, key)
            self._live[key] = 0
        self._set_size(key, self._counted(storage.nbytes(), tensor))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage. FSDP resizes storages without a dispatched operator."""
        self._set_size(storage._cdata, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self._total += size - self._live.get(key, 0)
        self._live[key] = size
        self._part_peak = max(self._part_peak, self._total)
        self.record.peak_bytes = max(self.record.peak_bytes, self._total)

    def _free(self, key: int) -> None:
        self._total -= self._live.pop(key, 0)


@contextmanager
def recorded(marks: RepeatMarks | None = None) -> Generator[StepRecord]:
    """Record the body; yield the record, which is complete after the body. `marks` mark repeated parts."""
    marks = marks or RepeatMarks(0)
    marks.recorder = recorder = StepRecorder(marks)
    with (
        recorder,
        _equal_chunks(),
        _answered_lists(),
        _single_samples(),
        _watched_resizes(recorder.resized),
        _marked_deferrals(marks),
        recorded_blocks(recorder.start_block),
    ):
        yield recorder.record
    recorder.end_part()
    marks.recorder = None


@contextmanager
def answered() -> Generator[None]:
    """Return zeros when the host reads lists of fake tensors in the body, as `recorded` does; record nothing."""
    with (
        _equal_chunks(),
        _answered_lists(),
        _single_samples(),
        recorded_blocks(lambda: lambda num_equal: True),
    ):
        yield


def _zeros(shape: tuple[int, ...]) -> Any:
    """Return nested lists of zeros, as the substitute for a fake tensor with dims, such as flags of bad steps."""
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


class _EqualParts(list[Tensor]):
    """List of `num` equal chunks of a tensor; every element is the view of the first chunk."""

    def __init__(self, whole: Tensor, num: int, dim: int) -> None:
        super().__init__([whole.narrow(dim, 0, whole.shape[dim] // num)] * num)
        self.whole = whole


def _equal_chunks() -> AbstractContextManager[Any]:
    """Make `torch.chunk` and `torch.cat` handle equal parts of a fake tensor as one tensor, without autograd.

    FSDP2 splits and concatenates gathered weights with one part per rank; a large job has thousands of ranks.
    """
    chunk, cat = torch.chunk, torch.cat

    def equal_chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
        is_usual = torch.is_grad_enabled() or not isinstance(tensor, FakeTensor) or not tensor.is_contiguous()
        return (
            chunk(tensor, chunks, dim) if is_usual or tensor.shape[dim] % chunks else _EqualParts(tensor, chunks, dim)
        )

    def equal_cat(tensors: list[Tensor] | tuple[Tensor, ...], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        if isinstance(tensors, _EqualParts):
            shape = list(tensors[0].shape)
            shape[dim] *= len(tensors)
            tensors = [tensors.whole.view(shape)]
        return cat(tensors, dim, out=out)

    return mock.patch.multiple(torch, chunk=equal_chunk, cat=equal_cat)


@contextmanager
def _answered_lists() -> Generator[None]:
    """Let `tolist` and `torch.tensor` read fake tensors: their values, or zeros, such as for flags of bad steps."""
    make = torch.tensor

    def to_list(tensor: Tensor) -> Any:
        return _zeros(tuple(tensor.shape)) if (values := values_of(tensor)) is None else values.tolist()

    def tensor_of(data: Any, **options: Any) -> Tensor:
        return make(pytree.tree_map_only(FakeTensor, to_list, data) if isinstance(data, list) else data, **options)

    with mock.patch.object(FakeTensor, "tolist", to_list), mock.patch.object(torch, "tensor", tensor_of):
        yield


def _single_samples() -> AbstractContextManager[Any]:
    """Let `transformers` mask packed samples only in rows with positions of the task: it cannot read fake positions.

    The positions that a model makes are views of one row.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        return nullcontext()

    def find(position_ids: Tensor) -> Tensor | None:
        is_own = position_ids._base is not None and position_ids._base.dim() == 1
        return None if is_own else original(position_ids)

    return mock.patch.object(masks, "find_packed_sequence_indices", find)


def _marked_deferrals(marks: RepeatMarks) -> AbstractContextManager[Any]:
    """Assign a deferred weight gradient to the part of the step that deferred it."""
    original = DeferredWeightGrads.put

    def put(later: DeferredWeightGrads, weight: Tensor, work: Callable[[], Tensor]) -> None:
        is_repeat = marks.is_repeat

        def marked() -> Tensor:
            marks.set(is_repeat=is_repeat)
            return work()

        original(later, weight, marked)

    return mock.patch.object(DeferredWeightGrads, "put", put)


def _watched_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[Any]:
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        on_resize(storage)
        return result

    return mock.patch.object(torch.UntypedStorage, "resize_", resize)
