"""Inserts the loss and the transfers between the computations of all ranks.

If every rank computes as early as it can, each output and gradient is available at a time on a common clock. A transfer
is inserted at that time on both of its ranks. All ranks thus agree on one order of all transfers. No deadlock is
possible, even if each transfer blocks both of its ranks until it completes.
"""

from collections.abc import Sequence
from operator import itemgetter

from d9d_pipeline._earliest import Span, earliest_times
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
    """Return the actions of each rank with the loss and transfers.

    Computations that can never run come last on their rank; `verify` reports the cause.

    Args:
        ranks: The computations of each rank, in order, on the stages that it holds.
        stage_ranks: The rank that holds each stage.
    """
    times = earliest_times(ranks, stage_ranks, duration=_units)
    # The rank of the loss comes first: no transfer of the same time may come between a forward and its loss.
    order = sorted(range(len(ranks)), key=lambda rank: rank != stage_ranks[-1])
    ended = [
        (end, rank, part)
        for rank in order
        for action, (_, end) in zip(ranks[rank], times[rank], strict=False)
        for part in parts(action)
    ]
    ended.sort(key=itemgetter(0))  # by the common clock; the sort is stable, so ties have one order on all ranks
    merged = [_MergedActions(actions, spans) for actions, spans in zip(ranks, times, strict=True)]
    for end, rank, part in ended:
        for holder, action in _follows(part, rank, stage_ranks):
            merged[holder].insert(end, action)
    return tuple(actions.all() for actions in merged)


class _MergedActions:
    """The computations of one rank, into which transfers are inserted by time."""

    def __init__(self, computed: Sequence[Compute], spans: Sequence[Span]) -> None:
        self._computed, self._spans = computed, spans
        self._next = 0  # index into the computations
        self._placed: list[Action] = []

    def insert(self, time: float, action: Action) -> None:
        """Insert an action after all computations that start before `time`; times must not decrease between calls."""
        while self._next < len(self._spans) and self._spans[self._next][0] < time:
            self._placed.append(self._computed[self._next])
            self._next += 1
        self._placed.append(action)

    def all(self) -> tuple[Action, ...]:
        """Return the merged actions, followed by the remaining computations."""
        return (*self._placed, *self._computed[self._next :])


def _follows(part: Part, rank: int, stage_ranks: Sequence[int]) -> tuple[tuple[int, Action], ...]:
    """Return the loss or the two sides of the transfer that follow a computation, each with its rank.

    Empty if the result stays on this rank.
    """
    if isinstance(part, BackwardWeight):
        return ()
    stage, microbatch = part.stage, part.microbatch
    if isinstance(part, Forward):
        if stage == len(stage_ranks) - 1:
            return ((rank, ComputeLoss(stage, microbatch)),)
        peer = stage_ranks[stage + 1]
        if peer == rank:
            return ()
        return (rank, SendOutput(stage, microbatch, peer)), (peer, ReceiveInput(stage + 1, microbatch, rank))
    if stage == 0 or stage_ranks[stage - 1] == rank:
        return ()
    peer = stage_ranks[stage - 1]
    return (
        (rank, SendInputGradient(stage, microbatch, peer)),
        (peer, ReceiveOutputGradient(stage - 1, microbatch, rank)),
    )


def _units(action: Compute) -> float:
    """Return the duration of an action if a forward and each half of a backward take one unit."""
    if isinstance(action, Overlap):
        return _units(action.forward) + _units(action.backward)
    return 2.0 if isinstance(action, Backward) else 1.0
