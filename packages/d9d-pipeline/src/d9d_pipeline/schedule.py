"""Contract of a schedule: the order of each rank's computations, from which `build` derives all other actions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from d9d_dist import UserError
from d9d_pipeline.actions import Compute

StagePlacement: TypeAlias = Literal["loop", "v"]
"""Assignment of stages to pipeline ranks.

With p ranks, `"loop"` gives rank r the stages r, r + p, r + 2p, ... `"v"` reverses every second round: with two stages
per rank, rank r holds stages r and 2p - 1 - r. Rank 0 then holds the first and the last stage.
"""


class Schedule(ABC):
    """Base class of schedules, whose instances yield the computations of each rank in order.

    Attributes:
        max_activations: Largest number of (stage, microbatch) pairs whose activations a rank may hold at a time; `None`
            for no bound. `build` rejects a program that exceeds it.
    """

    stages_per_rank: int = 1
    placement: StagePlacement = "loop"
    max_activations: int | None = None

    @abstractmethod
    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        """Return the computations of a pipeline rank in one step, in execution order; `build` adds the transfers.

        Raises:
            UserError: If the schedule does not support this number of ranks or microbatches.
        """


def ranks_of_stages(placement: StagePlacement, *, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each global stage; raise `UserError` for an unknown placement or `stages_per_rank` below 1."""
    if stages_per_rank < 1:
        raise UserError(f"got stages_per_rank = {stages_per_rank}; expected at least 1.")
    if placement not in get_args(StagePlacement):
        raise UserError(f"got the placement {placement!r}; expected one of {list(get_args(StagePlacement))}.")
    rounds = [range(num_ranks)] * stages_per_rank
    if placement == "v":
        rounds = [ranks if index % 2 == 0 else ranks[::-1] for index, ranks in enumerate(rounds)]
    return tuple(rank for ranks in rounds for rank in ranks)
