"""Schedules by name, for configuration files; a schedule of one's own is passed as an object instead."""

from typing import Literal, TypeAlias

from d9d_dist import UserError
from d9d_pipeline.schedule import Schedule
from d9d_pipeline.schedules.fill_drain import ForwardOnly, GPipe, LoopedBreadthFirst
from d9d_pipeline.schedules.one_forward_one_backward import Interleaved, OneForwardOneBackward
from d9d_pipeline.schedules.v_shaped import DualPipeV, ZeroBubbleV
from d9d_pipeline.schedules.zero_bubble import ZeroBubble1P

ScheduleName: TypeAlias = Literal[
    "forward_only", "gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"
]
"""What a schedule is called in a configuration."""

_SCHEDULES: dict[ScheduleName, type[Schedule]] = {
    "forward_only": ForwardOnly,
    "gpipe": GPipe,
    "looped_bfs": LoopedBreadthFirst,
    "1f1b": OneForwardOneBackward,
    "interleaved_1f1b": Interleaved,
    "zb1p": ZeroBubble1P,
    "zbv": ZeroBubbleV,
    "dualpipev": DualPipeV,
}


def schedule_named(name: ScheduleName, *, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of a name.

    Args:
        name: What it is called.
        stages_per_rank: How many stages each rank holds; `None` is the schedule's own default. Can be chosen for
            `forward_only`, `looped_bfs`, `interleaved_1f1b` and `zb1p`.

    Raises:
        UserError: If there is no such schedule, or not with so many stages on a rank.
    """
    if name not in _SCHEDULES:
        raise UserError(f"got the schedule {name!r}; expected one of {', '.join(_SCHEDULES)}.")
    kind = _SCHEDULES[name]
    if stages_per_rank is None:
        return kind()
    if issubclass(kind, ForwardOnly | LoopedBreadthFirst | Interleaved | ZeroBubble1P):
        return kind(stages_per_rank=stages_per_rank)
    schedule = kind()
    if stages_per_rank != schedule.stages_per_rank:
        raise UserError(
            f"got stages_per_rank = {stages_per_rank} for the schedule {name}, which has {schedule.stages_per_rank}; "
            "leave it out, or use looped_bfs, interleaved_1f1b or zb1p."
        )
    return schedule
