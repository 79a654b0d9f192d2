"""Earliest start and end times of each rank's computations, given their order and dependencies."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from d9d_pipeline.actions import BackwardWeight, Compute, Forward, Overlap

Span: TypeAlias = tuple[float, float]
"""Start and end time, in the unit of the durations."""

Product: TypeAlias = tuple[bool, int, int]
"""An activation or gradient that passes between stages: (is gradient, computing stage, microbatch)."""


def earliest_times(
    ranks: Sequence[Sequence[Compute]],
    stage_ranks: Sequence[int],
    *,
    duration: Callable[[Compute], float],
    transfer: float = 0.0,
) -> list[list[Span]]:
    """Return the times of each rank's actions if each starts as early as possible.

    A result is available on other ranks `transfer` after its computation ends. Actions that can never start, because of
    a missing or circular dependency, have no entry; they follow all actions that have one.
    """
    made: dict[Product, tuple[float, int]] = {}
    waiting: dict[Product, list[int]] = {}
    times: list[list[Span]] = [[] for _ in ranks]
    clocks = [0.0] * len(ranks)
    runnable = list(range(len(ranks)))
    last_stage = len(stage_ranks) - 1
    while runnable:
        rank = runnable.pop()
        clock, mine = clocks[rank], times[rank]
        for action in ranks[rank][len(mine) :]:
            start, missing = clock, None
            for product in needs(action, last_stage):
                found = made.get(product)
                if found is None:
                    missing = product
                    break
                time, maker = found
                start = max(start, time if maker == rank else time + transfer)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = start + duration(action)
            mine.append((start, clock))
            for product in makes(action):
                made[product] = (clock, rank)
                if product in waiting:
                    runnable += waiting.pop(product)
        clocks[rank] = clock
    return times


def needs(action: Compute, last_stage: int) -> tuple[Product, ...]:
    """Return the products that an action needs before it starts, from this rank or another."""
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
    """Return the products that an action computes."""
    if isinstance(action, Overlap):
        return makes(action.forward) + makes(action.backward)
    if isinstance(action, BackwardWeight):
        return ()
    return ((not isinstance(action, Forward), action.stage, action.microbatch),)
