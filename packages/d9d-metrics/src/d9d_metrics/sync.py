"""Reduction of all metrics of a job over ranks in one fused all-reduce."""

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import UserError
from d9d_metrics.accumulator import Accumulator, Reduction
from d9d_metrics.metric import Metric, MetricValue

M = TypeVar("M", bound=Metric)
_Shapes: TypeAlias = Sequence[tuple[Reduction, tuple[int, ...]]]
_SUMS: tuple[Reduction, ...] = ("sum",)
_COUNTS: tuple[Reduction, ...] = ("count",)
_EXTREMES: tuple[Reduction, ...] = ("max", "min")
_OTHERS: tuple[Reduction, ...] = (*_EXTREMES, "concat")
_ORDER = (*_SUMS, *_COUNTS, *_OTHERS)
_HALF_BITS = 32


def sync_metrics(metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> dict[str, M]:
    """Reduce metrics over ranks; the local metrics keep their state.

    Collectives: one float64 all-reduce for all metrics. On a mesh, one per axis with more than one rank; flatten the
    mesh to one axis to issue only one. Ranks without data contribute the identity of each reduction.

    The message has one element per sum and two per count: the halves of the count's bits, whose sums float64 holds
    exactly for up to 2**21 ranks. Each element of a maximum, minimum or concatenation takes one element *per rank*. A
    rank fills only its own element, so the sum over ranks is an all-gather.

    Args:
        metrics: Metrics by name, on the device of the group's backend. Every rank passes the same names and types;
            their order may differ.
        over: Process group or mesh to reduce over; `None` for only this process.

    Returns:
        Copies of the metrics with the reduced state, equal on every rank, in the order of `metrics`.
    """
    return MetricSync(metrics, over).start().wait()


def compute_metrics(metrics: Mapping[str, Metric], over: ProcessGroup | DeviceMesh | None) -> dict[str, float]:
    """Reduce metrics over ranks and return their values on the host, in the order of `metrics`.

    Arguments and collectives are those of `sync_metrics`. One host-device synchronization for all metrics.
    A scalar has the metric's name. A mapping becomes one `name/key` per key, and a tensor becomes `name/0`, `name/1`
    and so on.
    """
    return read_values({name: metric.compute() for name, metric in sync_metrics(metrics, over).items()})


def read_values(values: Mapping[str, MetricValue]) -> dict[str, float]:
    """Copy computed values to the host with one host-device synchronization; names as in `compute_metrics`.

    Values are tensors of any shape, all on one device, or nested mappings of such tensors.
    """
    tensors = dict(named_tensors(values))
    if not tensors:
        return {}
    numbers = iter(torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()]).tolist())
    return {
        name if tensor.dim() == 0 else f"{name}/{index}": next(numbers)
        for name, tensor in tensors.items()
        for index in range(tensor.numel())
    }


def named_tensors(values: Mapping[str, MetricValue]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of computed values with its name, such as `name/key`; raise `UserError` for other values."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{key}", tensor) for key, tensor in named_tensors(value))
        else:
            raise UserError(
                f"compute() of the metric {name} returned {'None' if value is None else f'a {type(value).__name__}'}; "
                "expected a tensor, or a mapping of tensors. Return torch.as_tensor(value)."
            )


@final
class MetricSync(Generic[M]):
    """Reusable reduction of the same metrics: the buffers are allocated once. See `sync_metrics` for the arguments.

    The first `start` moves the accumulator values into flat buffers, one each for sums, counts and other values. The
    accumulators become views of these buffers, so later calls copy each buffer at once.
    """

    def __init__(self, metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> None:
        found = [each for name in sorted(metrics) for each in metrics[name].accumulators().values()]
        self._local = sorted(found, key=lambda each: _ORDER.index(each.reduction))
        self._reduced = [each.holding(each.value) for each in self._local]
        # deepcopy takes objects from its memo instead of copying them: the copies hold the `_reduced` accumulators.
        memo: dict[int, object] = {id(a): b for a, b in zip(self._local, self._reduced, strict=True)}
        self._copies = copy.deepcopy(dict(metrics), memo)
        self._groups = _groups(over) if found else [None]
        self._all_reduces: list[_AllReduce] = []

    def start(self) -> "PendingSync[M]":
        """Copy the current state and start its all-reduce.

        The metrics may be updated and reset afterwards. On a mesh with several axes, this call waits for all but the
        last all-reduce.
        """
        device = self._local[0].value.device if self._local else torch.device("cpu")
        if not self._all_reduces or self._all_reduces[0].device != device:
            shapes = [(each.reduction, tuple(each.value.shape)) for each in self._local]
            # Buffers created in inference mode could not be updated in training.
            with torch.inference_mode(False):
                self._all_reduces = _all_reduces(shapes, self._groups, device)
        # Values are not views before the first sync, after `Metric.to`, and after a sync by another `MetricSync`.
        for accumulator, view in zip(self._local, self._all_reduces[0].before.views, strict=True):
            if accumulator.value is not view:
                accumulator.value = view.copy_(accumulator.value)
        for all_reduce, following in itertools.pairwise(self._all_reduces):
            all_reduce.receive(*all_reduce.send())
            following.before.copy_(all_reduce.after)
        last = self._all_reduces[-1]
        return PendingSync(last, *last.send(), self._reduced, self._copies)


@final
@dataclass(frozen=True, slots=True)
class PendingSync(Generic[M]):
    """Reduction in progress, started by `MetricSync.start`."""

    _all_reduce: "_AllReduce"
    _message: Tensor
    _work: dist.Work | None
    _reduced: list[Accumulator]
    _metrics: dict[str, M]

    def wait(self) -> dict[str, M]:
        """Return the metrics with the reduced state. On an accelerator only the stream waits for the all-reduce.

        The next `wait` of the same `MetricSync` overwrites the metrics.
        """
        self._all_reduce.receive(self._message, self._work)
        for accumulator, view in zip(self._reduced, self._all_reduce.after.views, strict=True):
            accumulator.value = view
        return self._metrics


@final
class _AllReduce:
    """All-reduce (sum) over one group. A message has sums, halves of counts, and one row per rank of the other values.

    Each rank fills only its own row, so the sum of the rows over ranks is an all-gather. `before` is the state of this
    rank, `after` the reduced state. All buffers except the message are allocated once: on the CPU, allocations would
    take most of the time.
    """

    def __init__(self, shapes: _Shapes, group: ProcessGroup | None, device: torch.device) -> None:
        self.device, self._group = device, group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        new = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        num_sums, num_counts, num_others = (_num_elements(shapes, kinds) for kinds in (_SUMS, _COUNTS, _OTHERS))
        self.before = _State(shapes, new(num_sums), new(num_counts, dtype=torch.int64), new(num_others))
        self._halves, zero = new(2, num_counts), new(1)
        others_before, others_after = zero.expand(rank * num_others), zero.expand((size - 1 - rank) * num_others)
        pieces = [self.before.sums, self._halves.view(-1), others_before, self.before.others, others_after]
        self._pieces = [piece for piece in pieces if piece.numel() > 0] or pieces[:1]

        self._arrived = new(num_sums + 2 * num_counts + size * num_others)
        sums, halves, rows = self._arrived.split([num_sums, 2 * num_counts, size * num_others])
        self._arrived_halves = halves.view(2, num_counts)
        gathered = [(name, (size * shape[0],) if name == "concat" else shape) for name, shape in shapes]
        others = new(_num_elements(gathered, _OTHERS))
        self.after = _State(gathered, sums, new(num_counts, dtype=torch.int64), others)
        self._rows = list(_blocks(shapes, rows.view(size, num_others)))
        self._results = [result for _, result in _blocks(gathered, others.view(1, -1))]

    def send(self) -> tuple[Tensor, dist.Work | None]:
        """Start the all-reduce of `before`; return the message and the work handle (`None` without a group)."""
        if self._halves.numel() > 0:
            counts = self.before.counts
            self._halves.copy_(torch.stack([counts >> _HALF_BITS, counts & (1 << _HALF_BITS) - 1]))
        message = torch.cat(self._pieces)
        work = None if self._group is None else dist.all_reduce(message, group=self._group, async_op=True)
        return message, work

    def receive(self, message: Tensor, work: dist.Work | None) -> None:
        """Wait for the all-reduce of a message, and compute `after` from it."""
        if work is not None:
            work.wait()
        self._arrived.copy_(message)
        if self._halves.numel() > 0:
            upper, lower = self._arrived_halves.long()
            torch.add(upper << _HALF_BITS, lower, out=self.after.counts)
        for (reduction, rows), result in zip(self._rows, self._results, strict=True):
            match reduction:
                case "max":
                    torch.amax(rows, 0, keepdim=True, out=result)
                case "min":
                    torch.amin(rows, 0, keepdim=True, out=result)
                case "concat":
                    result.view_as(rows).copy_(rows)


@final
class _State:
    """Accumulator values in three flat tensors: sums, counts (int64) and others. `views` has a view per accumulator."""

    def __init__(self, shapes: _Shapes, sums: Tensor, counts: Tensor, others: Tensor) -> None:
        self.shapes, self.sums, self.counts, self.others = shapes, sums, counts, others
        self.views: list[Tensor] = []
        for flat, kinds in ((sums, _SUMS), (counts, _COUNTS), (others, _OTHERS)):
            own = [shape for reduction, shape in shapes if reduction in kinds]
            pieces = flat.split([math.prod(shape) for shape in own]) if own else ()
            self.views += [piece.view(shape) for piece, shape in zip(pieces, own, strict=True)]

    def copy_(self, other: "_State") -> None:
        self.sums.copy_(other.sums)
        self.counts.copy_(other.counts)
        self.others.copy_(other.others)


def _num_elements(shapes: _Shapes, reductions: tuple[Reduction, ...]) -> int:
    return sum(math.prod(shape) for reduction, shape in shapes if reduction in reductions)


def _blocks(shapes: _Shapes, others: Tensor) -> Iterator[tuple[Reduction, Tensor]]:
    """Yield each reduction with its columns of `others`: all maxima, all minima, then each concatenation."""
    columns: list[tuple[Reduction, int]] = [(kind, _num_elements(shapes, (kind,))) for kind in _EXTREMES]
    columns += [(reduction, shape[0]) for reduction, shape in shapes if reduction == "concat"]
    start = 0
    for reduction, length in columns:
        if length > 0:
            yield reduction, others[:, start : start + length]
        start += length


def _all_reduces(shapes: _Shapes, groups: Sequence[ProcessGroup | None], device: torch.device) -> list[_AllReduce]:
    all_reduces = []
    for group in groups:
        all_reduces.append(_AllReduce(shapes, group, device))
        shapes = all_reduces[-1].after.shapes
    return all_reduces


def _groups(over: ProcessGroup | DeviceMesh | None) -> list[ProcessGroup | None]:
    """Return the groups to reduce over in sequence, without groups of one rank; `[None]` if no group is left."""
    match over:
        case None:
            groups = []
        case DeviceMesh():
            groups = over.get_all_groups()
        case _:
            groups = [over]
    return [group for group in groups if group.size() > 1] or [None]
