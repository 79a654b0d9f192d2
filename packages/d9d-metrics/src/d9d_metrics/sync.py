"""Reduces all metrics of a job over ranks in one fused collective, instead of a few small ones for each metric."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric

M = TypeVar("M", bound=Metric)
_AllReduce = Callable[[Tensor, Sequence[ProcessGroup]], Tensor]


def sync_metrics(metrics: Mapping[str, M], over: ProcessGroup | DeviceMesh | None) -> dict[str, M]:
    """Reduce metrics over ranks, and leave the local ones as they are.

    Collectives: one float64 all-reduce for all sums and one for all maxima and minima, of those that occur; on a mesh,
    that many for each axis of more than one rank. Pass a mesh flattened to one axis for the fewest. Ranks that
    saw nothing take part with the identity of each reduction.

    Args:
        metrics: The same names and kinds of metrics on every rank, on the device of the group's backend. Their order
            may differ.
        over: The ranks to reduce over; `None` for this process alone.

    Returns:
        Copies of the metrics that hold the reduced state, equal on every rank, in the order of `metrics`.
    """
    accumulators = [accumulator for name in sorted(metrics) for accumulator in metrics[name].accumulators().values()]
    reduced = _reduce(accumulators, _groups(over))
    replacement: dict[int, object] = {id(local): copied for local, copied in zip(accumulators, reduced, strict=True)}
    # deepcopy takes an object found in its memo instead of copying it: exactly the accumulators are swapped.
    return copy.deepcopy(dict(metrics), replacement)


def compute_metrics(metrics: Mapping[str, Metric], over: ProcessGroup | DeviceMesh | None) -> dict[str, float]:
    """Reduce scalar metrics over ranks and bring their values to the host.

    Issues the collectives of `sync_metrics` and waits for the device once, however many metrics there are.

    Args:
        metrics: As for `sync_metrics`; each computes a scalar.
        over: The ranks to reduce over; `None` for this process alone.

    Returns:
        The value of each metric over all ranks, in the order of `metrics`.
    """
    if not metrics:
        return {}
    values = torch.stack([metric.compute() for metric in sync_metrics(metrics, over).values()])
    return dict(zip(metrics, values.tolist(), strict=True))


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


def _reduce(accumulators: Sequence[Accumulator], groups: Sequence[ProcessGroup]) -> list[Accumulator]:
    """Reduced copies of the accumulators, in their order."""
    sums = _fused([a.value for a in accumulators if a.reduction == "sum"], groups, _all_reduce_sum)
    # min(x) = -max(-x): minima travel with the maxima.
    extremes = _fused([_as_max(a, a.value) for a in accumulators if a.reduction != "sum"], groups, _all_reduce_max)
    return [a.holding(next(sums) if a.reduction == "sum" else _as_max(a, next(extremes))) for a in accumulators]


def _as_max(accumulator: Accumulator, value: Tensor) -> Tensor:
    return -value if accumulator.reduction == "min" else value


def _fused(values: Sequence[Tensor], groups: Sequence[ProcessGroup], all_reduce: _AllReduce) -> Iterator[Tensor]:
    """All-reduce tensors as one flat tensor; views of the result in the shapes of `values`."""
    if not values:
        return iter(())
    flat = all_reduce(torch.cat([value.reshape(-1) for value in values]), groups)
    pieces = flat.split([value.numel() for value in values])
    return (piece.view(value.shape) for piece, value in zip(pieces, values, strict=True))


def _all_reduce_sum(flat: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=group)
    return flat


def _all_reduce_max(flat: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """All-reduce by maximum where NaN wins: backends disagree about it, so it travels as a flag beside the numbers."""
    is_nan = flat.isnan()
    both = torch.stack([flat.masked_fill(is_nan, -torch.inf), is_nan.to(flat.dtype)])
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, torch.nan)
