"""Reduces all metrics of a job over ranks in one fused collective, instead of a few small ones for each metric."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from d9d_metrics.accumulator import Accumulator, Reduction
from d9d_metrics.metric import Metric, MetricValue

M = TypeVar("M", bound=Metric)
_ORDER: tuple[Reduction, ...] = ("sum", "count", "max", "min", "concat")
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

    Args:
        metrics: As for `sync_metrics`.
        over: The ranks to reduce over; `None` for this process alone.
    """

    def __init__(self, metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> None:
        found = [each for name in sorted(metrics) for each in metrics[name].accumulators().values()]
        # Scalars of one reduction stand together: they are packed and unpacked by one operation.
        self._local = sorted(found, key=lambda each: (_ORDER.index(each.reduction), each.value.dim() > 0))
        self._layout = _Layout.of(self._local)
        reduced = [each.holding(each.value) for each in self._local]
        # deepcopy takes an object found in its memo instead of copying it: exactly the accumulators are swapped.
        memo: dict[int, object] = {id(a): b for a, b in zip(self._local, reduced, strict=True)}
        self._reduced, self._copies = reduced, copy.deepcopy(dict(metrics), memo)
        self._groups = _groups(over) if found else []

    def start(self) -> "PendingSync[M]":
        """Take the state as it is now, and let its reduction begin.

        The metrics may be updated and reset from here on. On a mesh of several axes all but the last collective are
        waited for here.
        """
        layout, flat = self._layout, self._layout.pack(self._local)
        for group in self._groups[:-1]:
            wire = layout.to_wire(flat, group)
            dist.all_reduce(wire, group=group)
            flat, layout = layout.from_wire(wire, group), layout.after(group)
        last = self._groups[-1] if self._groups else None
        wire = flat if last is None else layout.to_wire(flat, last)
        work = None if last is None else dist.all_reduce(wire, group=last, async_op=True)
        return PendingSync(layout, wire, last, work, into=(self._reduced, self._copies))


@final
class PendingSync(Generic[M]):
    """A reduction under way."""

    def __init__(
        self,
        layout: "_Layout",
        wire: Tensor,
        group: ProcessGroup | None,
        work: dist.Work | None,
        *,
        into: tuple[Sequence[Accumulator], dict[str, M]],
    ) -> None:
        self._layout, self._wire, self._group, self._work = layout, wire, group, work
        self._accumulators, self._metrics = into

    def wait(self) -> dict[str, M]:
        """Wait for the collective (on an accelerator, let the current stream wait for it).

        Returns:
            Metrics that hold the reduced state. The next `wait` of the same `MetricSync` changes them.
        """
        layout, flat = self._layout, self._wire
        if self._work is not None and self._group is not None:
            self._work.wait()
            flat, layout = layout.from_wire(self._wire, self._group), layout.after(self._group)
        for accumulator, value in zip(self._accumulators, layout.unpack(flat), strict=True):
            accumulator.value = value
        return self._metrics


class _Run(NamedTuple):
    """Accumulators that stand together: several scalars, or one tensor."""

    reduction: Reduction
    length: int
    shape: tuple[int, ...] | None

    @property
    def num_places(self) -> int:
        """How much room they take."""
        return 2 * self.length if self.reduction == "count" else self.length

    def write(self, values: Sequence[Tensor]) -> Tensor:
        """The values as one tensor of float64."""
        piece = torch.stack(tuple(values)) if self.shape is None else values[0].reshape(-1)
        if self.reduction == "count":
            return torch.cat([piece >> _HALF, piece & (1 << _HALF) - 1]).double()
        return piece

    def read(self, piece: Tensor) -> Sequence[Tensor]:
        """The values of what `write` gave; views, where they are no counts."""
        if self.reduction == "count":
            upper, lower = piece.long().view(2, self.length)
            piece = (upper << _HALF) + lower
        return piece.unbind() if self.shape is None else (piece.view(self.shape),)


@final
class _Layout:
    """How all accumulators are one flat tensor: first what is added up, then maxima, minima and concatenations."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = tuple(runs)
        self._places = [run.num_places for run in self._runs]
        self._num_sums = sum(run.num_places for run in self._runs if run.reduction in ("sum", "count"))
        self._num_others = sum(self._places) - self._num_sums

    @staticmethod
    def of(accumulators: Sequence[Accumulator]) -> "_Layout":
        runs = []
        for (reduction, is_scalar), group in itertools.groupby(
            accumulators, lambda each: (each.reduction, each.value.dim() == 0)
        ):
            members = list(group)
            if is_scalar:
                runs.append(_Run(reduction, len(members), None))
            else:
                runs += [_Run(reduction, each.value.numel(), tuple(each.value.shape)) for each in members]
        return _Layout(runs)

    def pack(self, accumulators: Sequence[Accumulator]) -> Tensor:
        """A new tensor that holds the values of the accumulators that the layout was made of."""
        values = [each.value for each in accumulators]
        if len(self._runs) == 1 and self._runs[0].shape is None:
            return self._runs[0].write(values)  # stacked, so it is new
        pieces, start = [], 0
        for run in self._runs:
            stop = start + (run.length if run.shape is None else 1)
            pieces.append(run.write(values[start:stop]))
            start = stop
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """The value of each accumulator."""
        pieces = [flat] if len(self._runs) == 1 else flat.split(self._places)
        return [value for run, piece in zip(self._runs, pieces, strict=True) for value in run.read(piece)]

    def to_wire(self, flat: Tensor, group: ProcessGroup) -> Tensor:
        """What an all-reduce by sum makes the sums of, and a gather of everything else: every rank has places."""
        num_sums, num_others = self._num_sums, self._num_others
        if num_others == 0:
            return flat
        wire = flat.new_zeros(num_sums + group.size() * num_others)
        wire[:num_sums] = flat[:num_sums]
        own = num_sums + group.rank() * num_others
        wire[own : own + num_others] = flat[num_sums:]
        return wire

    def from_wire(self, wire: Tensor, group: ProcessGroup) -> Tensor:
        """The flat tensor of the layout `after` the group, from what the all-reduce made of what `to_wire` gave."""
        if self._num_others == 0:
            return wire
        pieces = [wire[: self._num_sums]]
        places, start = wire[self._num_sums :].view(group.size(), self._num_others), 0
        for reduction, group_of_runs in itertools.groupby(self._runs, lambda run: run.reduction):
            runs = list(group_of_runs)
            if reduction in ("sum", "count"):
                continue
            for length in [run.length for run in runs] if reduction == "concat" else [sum(run.length for run in runs)]:
                block, start = places[:, start : start + length], start + length
                match reduction:
                    case "max":
                        pieces.append(block.amax(0))
                    case "min":
                        pieces.append(block.amin(0))
                    case "concat":
                        pieces.append(block.reshape(-1))
        return torch.cat(pieces)

    def after(self, group: ProcessGroup) -> "_Layout":
        """The layout of what is reduced over a group: concatenations hold what all of its ranks had."""
        if all(run.reduction != "concat" for run in self._runs):
            return self
        size = group.size()
        return _Layout(
            [
                _Run("concat", size * run.length, (size * run.length,)) if run.reduction == "concat" else run
                for run in self._runs
            ]
        )


def _groups(over: ProcessGroup | DeviceMesh | None) -> list[ProcessGroup]:
    """The process groups to reduce over one after the other; those of a single rank are left out."""
    match over:
        case None:
            groups = []
        case DeviceMesh():
            groups = over.get_all_groups()
        case _:
            groups = [over]
    return [group for group in groups if group.size() > 1]
