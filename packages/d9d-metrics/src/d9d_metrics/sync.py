"""Reduces all metrics of a job over ranks in one fused collective, instead of a few small ones for each metric."""

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from d9d_metrics.accumulator import Accumulator, Reduction
from d9d_metrics.metric import Metric, MetricValue

M = TypeVar("M", bound=Metric)
_Shapes: TypeAlias = Sequence[tuple[Reduction, tuple[int, ...]]]
_SUMS: tuple[Reduction, ...] = ("sum",)
_COUNTS: tuple[Reduction, ...] = ("count",)
_EXTREMES: tuple[Reduction, ...] = ("max", "min")
_OTHERS: tuple[Reduction, ...] = (*_EXTREMES, "concat")
_ORDER = (*_SUMS, *_COUNTS, *_OTHERS)
_HALF = 32  # bits


def sync_metrics(metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> dict[str, M]:
    """Reduce metrics over ranks, and leave the local ones as they are.

    Collectives: one float64 all-reduce for everything; on a mesh, one for each axis of more than one rank. Pass a mesh
    flattened to one axis for the fewest. Ranks that saw nothing take part with the identity of each reduction.

    The message has a place for each sum, two for each count (the halves of its bits, whose sums over up to 2**21 ranks
    float64 holds exactly), and one *for each rank* for each element of a maximum, a minimum or a concatenation: a rank
    fills its own, so that the sum over ranks is a gather. These are few, so one longer message costs less than two.

    Args:
        metrics: The same names and kinds of metrics on every rank, on the device of the group's backend. Their order
            may differ.
        over: The ranks to reduce over; `None` for this process alone.

    Returns:
        Copies of the metrics that hold the reduced state, equal on every rank, in the order of `metrics`.
    """
    return MetricSync(metrics, over).start().wait()


def compute_metrics(metrics: Mapping[str, Metric], over: ProcessGroup | DeviceMesh | None) -> dict[str, float]:
    """Reduce metrics over ranks and bring their values to the host.

    Issues the collective of `sync_metrics` and waits for the device once, however many metrics there are.

    Args:
        metrics: As for `sync_metrics`.
        over: The ranks to reduce over; `None` for this process alone.

    Returns:
        The values over all ranks, in the order of `metrics`. A metric that computes a scalar has its own name; one that
        computes a mapping has `name/key` for each of its keys, and a tensor has `name/0`, `name/1` and so on.
    """
    return read_values({name: metric.compute() for name, metric in sync_metrics(metrics, over).items()})


def read_values(values: Mapping[str, MetricValue]) -> dict[str, float]:
    """Bring computed values to the host, waiting for their device once.

    Args:
        values: Tensors of any shape on one device, or mappings of such, by name.

    Returns:
        Numbers by the names that `compute_metrics` describes.
    """
    tensors = dict(_flattened(values))
    if not tensors:
        return {}
    numbers = iter(torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()]).tolist())
    return {
        name if tensor.dim() == 0 else f"{name}/{index}": next(numbers)
        for name, tensor in tensors.items()
        for index in range(tensor.numel())
    }


def _flattened(values: Mapping[str, MetricValue]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from ((f"{name}/{key}", tensor) for key, tensor in _flattened(value))


@final
class MetricSync(Generic[M]):
    """Reduces the same metrics again and again: what does not change from time to time is worked out once.

    The first `start` moves the values of all accumulators into one tensor, of which they are views from then on, so
    that later ones take them all by one operation.

    Args:
        metrics: As for `sync_metrics`.
        over: The ranks to reduce over; `None` for this process alone.
    """

    def __init__(self, metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> None:
        found = [each for name in sorted(metrics) for each in metrics[name].accumulators().values()]
        local = sorted(found, key=lambda each: _ORDER.index(each.reduction))
        reduced = [each.holding(each.value) for each in local]
        # deepcopy takes an object found in its memo instead of copying it: exactly the accumulators are swapped.
        memo: dict[int, object] = {id(a): b for a, b in zip(local, reduced, strict=True)}
        self._copies = copy.deepcopy(dict(metrics), memo)
        self._local, self._reduced = _Holders(local), _Holders(reduced)
        self._groups = _groups(over) if found else [None]
        self._stages: list[_Stage] = []

    def start(self) -> "PendingSync[M]":
        """Take the state as it is now, and let its reduction begin.

        The metrics may be updated and reset from here on. On a mesh of several axes all but the last collective are
        waited for here.
        """
        if not self._stages or self._stages[0].device != self._local.device:
            with torch.inference_mode(False):  # metrics that were first read in an evaluation are updated in training
                self._stages = _stages(self._local.shapes, self._groups, self._local.device)
        self._local.move_to(self._stages[0].before)
        for stage, following in itertools.pairwise(self._stages):
            stage.receive(*stage.send())
            following.before.copy_(stage.after)
        last = self._stages[-1]
        return PendingSync(last, *last.send(), into=(self._reduced, self._copies))


@final
class PendingSync(Generic[M]):
    """A reduction under way."""

    def __init__(
        self, stage: "_Stage", wire: Tensor, work: dist.Work | None, *, into: tuple["_Holders", dict[str, M]]
    ) -> None:
        self._stage, self._wire, self._work = stage, wire, work
        self._reduced, self._metrics = into

    def wait(self) -> dict[str, M]:
        """Wait for the collective (on an accelerator, let the current stream wait for it).

        Returns:
            Metrics that hold the reduced state. The next `wait` of the same `MetricSync` changes them.
        """
        self._stage.receive(self._wire, self._work)
        self._reduced.show(self._stage.after)
        return self._metrics


@final
class _Holders:
    """Accumulators whose values are the views of a state."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self._accumulators = accumulators
        self.shapes = [(each.reduction, tuple(each.value.shape)) for each in accumulators]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._accumulators[0].value.device if self._accumulators else torch.device("cpu")

    def move_to(self, state: "_State") -> None:
        """Move values into the state that are not there: at first, or replaced since (`Metric.to`, another sync)."""
        for accumulator, view in zip(self._accumulators, state.views, strict=True):
            if accumulator.value is not view:
                accumulator.value = view.copy_(accumulator.value)

    def show(self, state: "_State") -> None:
        """Hold the values of the state."""
        for accumulator, view in zip(self._accumulators, state.views, strict=True):
            accumulator.value = view


@final
class _Stage:
    """An all-reduce by sum over one group: of sums, of the halves of counts, and of a row for each rank of the others.

    A rank fills its own row, so that the sum of rows over ranks is a gather. All but the message lives as long as the
    stage, so that little is left to do for each message: on CPU an operation costs more than what it works on.

    Attributes:
        device: Where it takes place.
        before: What this rank puts in.
        after: What comes out.
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
        """Begin the all-reduce of a message that holds `before` as it is now."""
        if self._halves.numel() > 0:
            counts = self.before.counts
            self._halves.copy_(torch.stack([counts >> _HALF, counts & (1 << _HALF) - 1]))
        wire = torch.cat(self._pieces)
        work = None if self._group is None else dist.all_reduce(wire, group=self._group, async_op=True)
        return wire, work

    def receive(self, wire: Tensor, work: dist.Work | None) -> None:
        """Wait for a message, and work out `after`."""
        if work is not None:
            work.wait()
        self._arrived.copy_(wire)
        if self._halves.numel() > 0:
            upper, lower = self._arrived_halves.long()
            torch.add(upper << _HALF, lower, out=self.after.counts)
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
    """The values of accumulators, in the order of their reductions, as three flat tensors.

    Attributes:
        shapes: The reduction and the shape of each.
        sums: float64.
        counts: int64.
        others: Maxima, minima and concatenations; float64.
        views: The value of each accumulator: a view of one of them.
    """

    def __init__(self, shapes: _Shapes, sums: Tensor, counts: Tensor, others: Tensor) -> None:
        self.shapes, self.sums, self.counts, self.others = shapes, sums, counts, others
        self.views: list[Tensor] = []
        for flat, kinds in ((sums, _SUMS), (counts, _COUNTS), (others, _OTHERS)):
            own = [shape for reduction, shape in shapes if reduction in kinds]
            pieces = flat.split([math.prod(shape) for shape in own]) if own else ()
            self.views += [piece.view(shape) for piece, shape in zip(pieces, own, strict=True)]

    def copy_(self, other: "_State") -> None:
        """Take over the values of a state of the same shapes."""
        self.sums.copy_(other.sums)
        self.counts.copy_(other.counts)
        self.others.copy_(other.others)


def _num_elements(shapes: _Shapes, reductions: tuple[Reduction, ...]) -> int:
    return sum(math.prod(shape) for reduction, shape in shapes if reduction in reductions)


def _blocks(shapes: _Shapes, others: Tensor) -> Iterator[tuple[Reduction, Tensor]]:
    """The columns of all maxima, of all minima, and of each concatenation."""
    columns: list[tuple[Reduction, int]] = [(kind, _num_elements(shapes, (kind,))) for kind in _EXTREMES]
    columns += [(reduction, shape[0]) for reduction, shape in shapes if reduction == "concat"]
    start = 0
    for reduction, length in columns:
        if length > 0:
            yield reduction, others[:, start : start + length]
        start += length


def _stages(shapes: _Shapes, groups: Sequence[ProcessGroup | None], device: torch.device) -> list[_Stage]:
    """One for each group, each fed with what comes out of the one before."""
    stages = []
    for group in groups:
        stages.append(_Stage(shapes, group, device))
        shapes = stages[-1].after.shapes
    return stages


def _groups(over: ProcessGroup | DeviceMesh | None) -> list[ProcessGroup | None]:
    """The groups to reduce over one after the other, without those of a single rank; `None` if there is no other."""
    match over:
        case None:
            groups = []
        case DeviceMesh():
            groups = over.get_all_groups()
        case _:
            groups = [over]
    return [group for group in groups if group.size() > 1] or [None]
