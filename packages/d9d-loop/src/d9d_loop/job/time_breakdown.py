"""Time breakdown of a profile: compute, communication, exposed communication and idle time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_Span = tuple[float, float]

_COMMUNICATION = ("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms", "mpi:", "ucc:", "xccl:")
"""Prefixes of the profiler's event names for collectives: device kernels, backend work on the CPU, and waits."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Time breakdown of one rank, in seconds. Overlapping spans count once.

    Attributes:
        total: Time from the start of the first event to the end of the last.
        compute: Time in which at least one compute kernel ran; on CPU, at least one torch operator.
        communication: Time in which at least one collective ran.
        exposed: Time in which a collective ran and no kernel computed, which faster links could reduce.
        idle: Time in which neither a compute event nor a collective ran.
    """

    total: float
    compute: float
    communication: float
    exposed: float
    idle: float


def break_down(compute: Iterable[_Span], communication: Iterable[_Span], *, total: _Span) -> TimeBreakdown:
    """Compute the time breakdown of one rank from spans in seconds, in any order, which are clipped to `total`."""
    computing, communicating = _union(compute, total), _union(communication, total)
    busy = _length(_union([*computing, *communicating], total))
    whole = total[1] - total[0]
    return TimeBreakdown(
        total=whole,
        compute=_length(computing),
        communication=_length(communicating),
        exposed=busy - _length(computing),
        idle=whole - busy,
    )


def spans_of(events: Iterable[Any]) -> tuple[list[_Span], list[_Span]]:
    """Return the compute and communication spans of `torch.profiler` events, in seconds.

    Host events are ignored if there are device events.
    """
    known = list(events)
    on_device = [event for event in known if event.device_type.name != "CPU"]
    compute: list[_Span] = []
    communication: list[_Span] = []
    for event in on_device or known:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.name.startswith(_COMMUNICATION):
            communication.append(span)
        elif on_device or event.name.startswith("aten::"):
            compute.append(span)
    return compute, communication


def _union(spans: Iterable[_Span], total: _Span) -> list[_Span]:
    """Return the union of spans as sorted, disjoint spans, clipped to `total`."""
    merged: list[_Span] = []
    for start, end in sorted((max(start, total[0]), min(end, total[1])) for start, end in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def _length(disjoint: Sequence[_Span]) -> float:
    return sum(end - start for start, end in disjoint)
