"""Record of a step without values: operators with FLOPs and bytes, collectives, and bytes of live tensors.

`StepRecorder` is a dispatch mode. It works on real and on fake tensors, so the same code records a rehearsal and a real
run. Under `FakeTensorMode` it also answers the host's reads of tensors, which have no values.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from d9d_loop.planning.collective_log import Collective, collective_of


@dataclass(frozen=True, slots=True)
class Operation:
    """Operator call that computes.

    Attributes:
        name: torch's name of the operator, without overload.
        flops: Floating-point operations of matrix products and attention; 0 for other operators.
        num_bytes: Bytes of all inputs and outputs, each counted once.
        shapes: Shapes of the tensor arguments.
        results: Shapes of the tensor results.
    """

    name: str
    flops: int
    num_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...] = ()


@final
@dataclass(slots=True)
class StepRecord:
    """Operators, collectives and memory of a step on one rank.

    Attributes:
        operations: Operator calls that compute, in order. Views and allocations are excluded.
        collectives: Collectives, in order.
        peak_bytes: Largest sum of the bytes of storages that were allocated in the step and alive at the same time.
        peaks: Largest sum between two successive marks, without the parts that `Marks` excludes. One without marks.
    """

    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    peak_bytes: int = 0
    peaks: list[int] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Floating-point operations of all operators."""
        return sum(operation.flops for operation in self.operations)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all operators read and write, if every operator reads its inputs from memory."""
        return sum(operation.num_bytes for operation in self.operations)

    def collective_bytes(self) -> Counter[tuple[str, int]]:
        """Return the bytes by name of the collective and group size."""
        totals: Counter[tuple[str, int]] = Counter()
        for each in self.collectives:
            totals[each.name, len(each.ranks)] += each.num_bytes
        return totals


@final
class Marks:
    """Marks of a recorded step, which divide its memory into parts. `set` starts a part."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None

    def set(self, *, is_kept: bool) -> None:
        """Start a part of the step, if it is recorded; the peak of the part is kept or excluded."""
        if self.recorder is not None:
            self.recorder.start_part(is_kept=is_kept)


@final
class StepRecorder(TorchDispatchMode):
    """Dispatch mode that fills a `StepRecord`; use it inside of `FakeTensorMode` or without it.

    Attributes:
        record: What was recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = StepRecord()
        self._live: dict[int, int] = {}
        self._total = self._part_peak = 0
        self._is_kept = True

    def start_part(self, *, is_kept: bool) -> None:
        """End the current part of the step, and start another one."""
        if self._is_kept:
            self.record.peaks.append(self._part_peak)
        self._part_peak, self._is_kept = self._total, is_kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _answer(args[0])
        result = func(*args, **kwargs)
        collective = collective_of(func, args, kwargs, result)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if collective is not None:
            self.record.collectives.append(collective)
        elif not func.is_view and func.namespace not in ("c10d", "_c10d_functional", "prim"):
            self._add(func, args, kwargs, result, outputs)
        for leaf in outputs:
            self._track(leaf)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        if name.startswith(("empty", "new_empty", "detach", "alias")):
            return
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {id(tensor): tensor for tensor in (*tensors, *outputs)}
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in known.values())
        shapes = (tuple(tuple(tensor.shape) for tensor in each) for each in (tensors, outputs))
        self.record.operations.append(Operation(name, flops, num_bytes, *shapes))

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            weakref.finalize(storage, self._free, key)
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage. FSDP resizes storages without a dispatched operator."""
        size, key = storage.nbytes(), storage._cdata
        self._total += size - self._live.get(key, 0)
        self._live[key] = size
        self._part_peak = max(self._part_peak, self._total)
        self.record.peak_bytes = max(self.record.peak_bytes, self._total)

    def _free(self, key: int) -> None:
        self._total -= self._live.pop(key, 0)


@contextmanager
def recorded(marks: Marks | None = None) -> Generator[StepRecord]:
    """Record the body; yield the record, which is complete after the body. `marks` divide its memory into parts."""
    recorder = StepRecorder()
    marks = marks or Marks()
    marks.recorder = recorder
    with recorder, _answered_lists(), _watched_resizes(recorder.resized):
        yield recorder.record
    marks.recorder = None
    recorder.start_part(is_kept=False)


class _Answers(TorchDispatchMode):
    """Dispatch mode that answers the host's reads of fake scalars."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _answer(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def answered() -> Generator[None]:
    """Answer the host's reads of fake tensors in the body, as `recorded` does, and record nothing."""
    with _Answers(), _answered_lists():
        yield


def _answer(tensor: Tensor) -> float | bool:
    """Return the value that the host reads from a fake scalar: numbers are finite and not 0."""
    return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 0


def _zeros(shape: tuple[int, ...]) -> Any:
    """Return nested lists of zeros for a fake tensor with dims that the host reads, such as flags of bad steps."""
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


@contextmanager
def _answered_lists() -> Generator[None]:
    """Answer `tolist` of fake tensors, which reads flags of bad steps; torch's own reads one scalar after another."""
    original = FakeTensor.tolist
    FakeTensor.tolist = lambda tensor: _zeros(tuple(tensor.shape))  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        FakeTensor.tolist = original


@contextmanager
def _watched_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Generator[None]:
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        on_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
