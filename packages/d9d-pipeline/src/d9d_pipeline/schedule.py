"""The contract of a schedule: it says in which order a rank computes, and everything else is derived from that."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from d9d_dist import UserError
from d9d_pipeline.actions import Compute

Placement: TypeAlias = Literal["loop", "v"]
"""Which rank holds which stage.

`"loop"`: rank r of p holds r, r + p, r + 2p, ...; `"v"`: every other turn runs backwards, so that rank r of p holds r
and 2p - 1 - r, and the first and the last stage are on rank 0.
"""


class Schedule(ABC):
    """Emits the actions of each rank in order. A schedule of one's own is a subclass, passed as an object.

    Attributes:
        stages_per_rank: How many stages each rank holds.
        placement: Which ones.
        max_activations: Largest number of (stage, microbatch) pairs whose activations a rank may hold at a time; `None`
            for no bound. `build` refuses a program that holds more.
    """

    stages_per_rank: int = 1
    placement: Placement = "loop"
    max_activations: int | None = None

    @abstractmethod
    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        """What one rank computes in one step, in the order in which it does.

        Loss and transfers are not emitted: `build` adds them.

        Args:
            rank: The pipeline rank.
            num_ranks: Number of pipeline ranks.
            num_microbatches: Number of microbatches of a step.

        Raises:
            UserError: If the schedule does not exist for these numbers.
        """


def ranks_of_stages(placement: Placement, *, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of every stage.

    Raises:
        UserError: If a rank holds no stage, or the placement is unknown.
    """
    if stages_per_rank < 1:
        raise UserError(f"got stages_per_rank = {stages_per_rank}; expected at least 1.")
    if placement not in get_args(Placement):
        raise UserError(f"got the placement {placement!r}; expected one of {list(get_args(Placement))}.")
    turns = [range(num_ranks)] * stages_per_rank
    if placement == "v":
        turns = [turn if index % 2 == 0 else turn[::-1] for index, turn in enumerate(turns)]
    return tuple(rank for turn in turns for rank in turn)
