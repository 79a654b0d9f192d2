"""Insertion of the loss and the transfers between the computations of all ranks.

The ranks are simulated on a common clock, each computing as early as possible. Each transfer is inserted on both of its
ranks at the time its tensor becomes available. All ranks thus order the transfers identically, so no deadlock is
possible, even if a transfer blocks both ranks until it completes.
"""

from collections.abc import Sequence
from operator import itemgetter

from d9d_pipeline._earliest import earliest_times
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardWeight,
    Compute,
    ComputeLoss,
    Forward,
    Overlap,
    Part,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    parts,
)


def with_transfers(ranks: Sequence[Sequence[Compute]], stage_ranks: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions with loss and transfers; computations that can never run come last."""
    times = earliest_times(ranks, stage_ranks, duration=_units)
    # The rank of the loss comes first: no simultaneous transfer may come between a forward and its loss.
    order = sorted(range(len(ranks)), key=lambda rank: rank != stage_ranks[-1])
    ended = [
        (end, rank, part)
        for rank in order
        for action, (_, end) in zip(ranks[rank], times[rank], strict=False)
        for part in parts(action)
    ]
    ended.sort(key=itemgetter(0))  # by simulated end time; the sort is stable, so ties have the same order on all ranks
    placed: list[list[tuple[float, int, Action]]] = [
        [(start, 1, action) for action, (start, _) in zip(actions, spans, strict=False)]
        for actions, spans in zip(ranks, times, strict=True)
    ]
    for end, rank, part in ended:
        for holder, action in _follows(part, rank, stage_ranks):
            placed[holder].append((end, 0, action))  # 0: before the computations that start at this time
    return tuple(
        (*(action for _, _, action in sorted(merged, key=itemgetter(0, 1))), *actions[len(spans) :])
        for merged, actions, spans in zip(placed, ranks, times, strict=True)
    )


def _follows(part: Part, rank: int, stage_ranks: Sequence[int]) -> tuple[tuple[int, Action], ...]:
    """Return the loss or the two sides of the transfer that follow a computation, each with its rank."""
    stage, microbatch = part.stage, part.microbatch
    if isinstance(part, Forward):
        if stage == len(stage_ranks) - 1:
            return ((rank, ComputeLoss(stage, microbatch)),)
        neighbor, send, receive = stage + 1, SendOutput, ReceiveInput
    else:
        neighbor, send, receive = stage - 1, SendInputGradient, ReceiveOutputGradient
    if isinstance(part, BackwardWeight) or neighbor < 0 or stage_ranks[neighbor] == rank:
        return ()
    peer = stage_ranks[neighbor]
    return (rank, send(stage, microbatch, peer)), (peer, receive(neighbor, microbatch, rank))


def _units(action: Compute) -> float:
    """Return the duration of an action if a forward and each half of a backward take one unit."""
    if isinstance(action, Overlap):
        return _units(action.forward) + _units(action.backward)
    return 2.0 if isinstance(action, Backward) else 1.0
