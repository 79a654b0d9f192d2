"""What a step of a program would take, computed from what single actions take: time, waiting, memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from d9d_dist import UserError
from d9d_pipeline._earliest import Span, earliest_times, makes
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Overlap,
    SendInputGradient,
    SendOutput,
)
from d9d_pipeline.program import Program
from d9d_pipeline.timeline import TimedAction, Timeline
from d9d_pipeline.verify import verify


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """What actions take, in any unit of time.

    Attributes:
        forward: A forward of one stage.
        backward_input: The first half of a backward.
        backward_weight: The second half. A whole backward takes both.
        transfer: From the end of what makes an output or gradient until another rank has it. Ranks compute meanwhile.
        overlap: How long an overlap takes, as a share of its parts one after the other.

    Raises:
        UserError: If one of them is negative.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        each = (self.forward, self.backward_input, self.backward_weight, self.transfer, self.overlap)
        if min(each) < 0:
            raise UserError(f"got {self}; expected costs of 0 or more.")

    def of(self, action: Compute) -> float:
        """What an action takes."""
        match action:
            case Forward():
                return self.forward
            case BackwardInput():
                return self.backward_input
            case BackwardWeight():
                return self.backward_weight
            case Backward():
                return self.backward_input + self.backward_weight
            case Overlap(forward, backward):
                return self.overlap * (self.of(forward) + self.of(backward))


def simulate(
    program: Program, costs: Costs | None = None, *, duration: Callable[[Compute], float] | None = None
) -> Timeline:
    """Play a program through, each rank doing what it computes as early as its order and its inputs allow.

    Transfers take their time, but no rank waits for them before it needs what they bring: they overlap with what is
    computed, and do not slow each other down. Those that take time are part of the result, on the rank that sends.

    Args:
        program: What ranks do.
        costs: What actions take; `None` counts a forward and each half of a backward as 1, and transfers as nothing.
        duration: What an action takes, where stages differ; of `costs` only `transfer` holds then.

    Raises:
        ProgramError: If the program is not valid.
    """
    verify(program)
    costs = costs or Costs()
    computed = [tuple(program.computed(rank)) for rank in range(len(program.ranks))]
    times = earliest_times(computed, program.stage_ranks, duration=duration or costs.of, transfer=costs.transfer)
    ranks = []
    for actions, mine, spans in zip(program.ranks, computed, times, strict=True):
        timed = [TimedAction(action, *span) for action, span in zip(mine, spans, strict=True)]
        if costs.transfer > 0:
            timed += _sent(actions, mine, spans, costs.transfer)
            timed.sort(key=lambda each: each.start)
        ranks.append(tuple(timed))
    return Timeline(tuple(ranks))


def _sent(
    actions: Sequence[Action], computed: Sequence[Compute], spans: Sequence[Span], transfer: float
) -> Iterator[TimedAction]:
    """What a rank sends, from when it is there."""
    ends = {product: end for action, (_, end) in zip(computed, spans, strict=True) for product in makes(action)}
    for action in actions:
        if isinstance(action, SendOutput | SendInputGradient):
            there = ends[isinstance(action, SendInputGradient), action.stage, action.microbatch]
            yield TimedAction(action, there, there + transfer)
