"""Loss and transfers, put where they belong between what ranks compute.

If every rank does everything as early as it can, each output and each gradient is there at some time of a common clock.
A transfer takes its place, on both of its ranks, at that time among what they start. So all ranks agree on one order of
all transfers, and even if each of them blocked its two ranks until it is done, none could wait for another in a circle.
"""

from collections.abc import Sequence
from operator import itemgetter

from d9d_pipeline._earliest import Span, earliest_times
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardWeight,
    Compute,
    Forward,
    Loss,
    Overlap,
    Part,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    parts,
)


def with_transfers(ranks: Sequence[Sequence[Compute]], stage_ranks: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank with loss and transfers.

    What can never be computed comes last on its rank, for `verify` to tell why.

    Args:
        ranks: What each rank computes, in order; of the stages that it holds.
        stage_ranks: For each stage the rank that holds it.
    """
    times = earliest_times(ranks, stage_ranks, duration=_units)
    # The rank of the loss goes first: no transfer of the same time shall come between a forward and its loss.
    order = sorted(range(len(ranks)), key=lambda rank: rank != stage_ranks[-1])
    ended = [
        (end, rank, part)
        for rank in order
        for action, (_, end) in zip(ranks[rank], times[rank], strict=False)
        for part in parts(action)
    ]
    ended.sort(key=itemgetter(0))  # the clock that all ranks share; at the same time, any order that all share
    lines = [_Line(actions, spans) for actions, spans in zip(ranks, times, strict=True)]
    for end, rank, part in ended:
        for holder, action in _follows(part, rank, stage_ranks):
            lines[holder].insert(end, action)
    return tuple(line.all() for line in lines)


class _Line:
    """The actions of one rank, as they are put in order."""

    def __init__(self, computed: Sequence[Compute], spans: Sequence[Span]) -> None:
        self._computed, self._spans = computed, spans
        self._next = 0  # of what is computed
        self._placed: list[Action] = []

    def insert(self, time: float, action: Action) -> None:
        """Put an action behind all that starts before a time; times must not go back."""
        while self._next < len(self._spans) and self._spans[self._next][0] < time:
            self._placed.append(self._computed[self._next])
            self._next += 1
        self._placed.append(action)

    def all(self) -> tuple[Action, ...]:
        """What was put in order, and the rest of what is computed."""
        return (*self._placed, *self._computed[self._next :])


def _follows(part: Part, rank: int, stage_ranks: Sequence[int]) -> tuple[tuple[int, Action], ...]:
    """What happens to the result of a computation, and on which ranks; nothing if it stays here."""
    if isinstance(part, BackwardWeight):
        return ()
    stage, microbatch = part.stage, part.microbatch
    if isinstance(part, Forward):
        if stage == len(stage_ranks) - 1:
            return ((rank, Loss(stage, microbatch)),)
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
    """How long an action takes when forward and both halves of backward take the same time."""
    if isinstance(action, Overlap):
        return _units(action.forward) + _units(action.backward)
    return 2.0 if isinstance(action, Backward) else 1.0
