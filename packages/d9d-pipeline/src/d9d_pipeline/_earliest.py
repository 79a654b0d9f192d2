"""When each rank computes what, if it does everything as early as its order and what it depends on allow."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from d9d_pipeline.actions import BackwardWeight, Compute, Forward, Overlap

Span: TypeAlias = tuple[float, float]
"""Start and end, in the unit of the durations."""

Product: TypeAlias = tuple[bool, int, int]
"""What passes between stages: whether it is a gradient, the stage that made it, and the microbatch."""


def earliest_times(
    ranks: Sequence[Sequence[Compute]],
    stage_ranks: Sequence[int],
    *,
    duration: Callable[[Compute], float],
    transfer: float = 0.0,
) -> list[list[Span]]:
    """Play all ranks through; for each rank the times of its actions. Those that can never start are left out.

    Args:
        ranks: What each rank computes, in order.
        stage_ranks: For each stage the rank that holds it.
        duration: How long an action takes.
        transfer: How much later what one rank made is there for another.
    """
    made: dict[Product, tuple[float, int]] = {}
    waiting: dict[Product, list[int]] = {}
    times: list[list[Span]] = [[] for _ in ranks]
    clocks = [0.0] * len(ranks)
    awake = list(range(len(ranks)))
    last_stage = len(stage_ranks) - 1
    while awake:
        rank = awake.pop()
        clock, mine = clocks[rank], times[rank]
        for action in ranks[rank][len(mine) :]:
            start, missing = clock, None
            for product in needs(action, last_stage):
                there = made.get(product)
                if there is None:
                    missing = product
                    break
                time, maker = there
                start = max(start, time if maker == rank else time + transfer)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = start + duration(action)
            mine.append((start, clock))
            for product in makes(action):
                made[product] = (clock, rank)
                if product in waiting:
                    awake += waiting.pop(product)
        clocks[rank] = clock
    return times


def needs(action: Compute, last_stage: int) -> tuple[Product, ...]:
    """What has to be there before an action starts, on this rank or from another."""
    if isinstance(action, Overlap):
        return needs(action.forward, last_stage) + needs(action.backward, last_stage)
    stage, microbatch = action.stage, action.microbatch
    if isinstance(action, Forward):
        return ((False, stage - 1, microbatch),) if stage > 0 else ()
    if isinstance(action, BackwardWeight):
        return ((True, stage, microbatch),)
    if stage == last_stage:
        return ((False, stage, microbatch),)
    return (False, stage, microbatch), (True, stage + 1, microbatch)


def makes(action: Compute) -> tuple[Product, ...]:
    """What is there when an action ends."""
    if isinstance(action, Overlap):
        return makes(action.forward) + makes(action.backward)
    if isinstance(action, BackwardWeight):
        return ()
    return ((not isinstance(action, Forward), action.stage, action.microbatch),)
