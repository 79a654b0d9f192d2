"""Where the time of a profile went: computing, communicating, and doing neither."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_Span = tuple[float, float]

_COMMUNICATION = ("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms", "mpi:", "ucc:", "xccl:")
"""What the names of collectives begin with: device kernels, the work of a backend's threads, and waiting for it."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Seconds of one rank, by what it did; the unions of times, so that what overlaps counts once.

    Attributes:
        total: From the first moment to the last.
        compute: While at least one kernel computed; on a CPU, one operator of torch.
        communication: While at least one collective was under way.
        exposed: While a collective was under way, and nothing computed: what faster links could save.
        idle: While neither was.
    """

    total: float
    compute: float
    communication: float
    exposed: float
    idle: float


def break_down(compute: Iterable[_Span], communication: Iterable[_Span], *, total: _Span) -> TimeBreakdown:
    """Break the time of one rank down.

    Args:
        compute: Start and end of what computed, in seconds, in any order, overlapping as they may.
        communication: Those of collectives.
        total: The first moment and the last; what is outside is left out.
    """
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
    """Spans of computing and of communication, in seconds, of what `torch.profiler` recorded.

    Args:
        events: `profile.events()`. Where there are kernels of a device among them, those alone count.
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
    """The same moments as disjoint spans in order, without what is outside."""
    cut = sorted((max(start, total[0]), min(end, total[1])) for start, end in spans)
    merged: list[_Span] = []
    for start, end in cut:
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(disjoint: Sequence[_Span]) -> float:
    return sum(end - start for start, end in disjoint)
