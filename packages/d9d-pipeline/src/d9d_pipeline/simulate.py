"""Simulation of a program's step from the costs of its actions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from d9d_dist import UserError
from d9d_pipeline._earliest import earliest_times, makes
from d9d_pipeline.actions import Backward, BackwardInput, Compute, Forward, Overlap, SendInputGradient, SendOutput
from d9d_pipeline.program import Program
from d9d_pipeline.timeline import TimedAction, Timeline
from d9d_pipeline.verify import verify


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of actions, in any unit of time.

    Attributes:
        backward_weight: Duration of a `BackwardWeight`. A `Backward` takes `backward_input + backward_weight`.
        transfer: Time from the end of a computation until its result is available on another rank. Transfers overlap
            with computation.
        overlap: Duration of an `Overlap`, as a fraction of the sum of its parts' durations.

    Raises:
        UserError: If any cost is negative.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        values = (self.forward, self.backward_input, self.backward_weight, self.transfer, self.overlap)
        if not all(value >= 0 for value in values):  # NaN is not
            raise UserError(f"got {self}; expected costs of 0 or more.")

    def of(self, action: Compute) -> float:
        """Return the duration of an action."""
        if isinstance(action, Overlap):
            return self.overlap * (self.of(action.forward) + self.of(action.backward))
        if isinstance(action, Forward):
            return self.forward
        if isinstance(action, Backward):
            return self.backward_input + self.backward_weight
        return self.backward_input if isinstance(action, BackwardInput) else self.backward_weight


def simulate(
    program: Program, costs: Costs | None = None, *, duration: Callable[[Compute], float] | None = None
) -> Timeline:
    """Simulate a program in which each rank computes as early as its order and its inputs allow.

    A rank waits for a transfer only when it needs the result. Transfers do not slow each other down. If
    `costs.transfer` is positive, the timeline of each sending rank includes its transfers. Times are in the unit of the
    costs.

    Args:
        program: The program.
        costs: Durations of actions; `None` counts a forward and each half of a backward as 1, and transfers as 0.
        duration: Function that returns the duration of a computation, for stages of different cost. If given, only
            `transfer` of `costs` is used.

    Raises:
        ProgramError: If the program does not pass `verify`.
    """
    verify(program)
    costs = costs or Costs()
    computed = [tuple(program.computed(rank)) for rank in range(len(program.ranks))]
    times = earliest_times(computed, program.stage_ranks, duration=duration or costs.of, transfer=costs.transfer)
    ranks = []
    for actions, own, spans in zip(program.ranks, computed, times, strict=True):
        timed = [TimedAction(action, *span) for action, span in zip(own, spans, strict=True)]
        if costs.transfer > 0:
            ends = {product: end for action, (_, end) in zip(own, spans, strict=True) for product in makes(action)}
            for action in actions:
                if isinstance(action, SendOutput | SendInputGradient):
                    start = ends[isinstance(action, SendInputGradient), action.stage, action.microbatch]
                    timed.append(TimedAction(action, start, start + costs.transfer))
            timed.sort(key=lambda each: each.start)
        ranks.append(tuple(timed))
    return Timeline(tuple(ranks))
