"""All forwards, then all backwards: the simplest schedules. They hold the activations of all microbatches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import Backward, Forward
from d9d_pipeline.schedule import Schedule, StagePlacement, ranks_of_stages


@final
@dataclass(frozen=True)
class ForwardOnly(Schedule):
    """Inference and evaluation: one forward per microbatch and stage.

    `stages_per_rank` and `placement` must be the same as in the training schedule.
    """

    stages_per_rank: int = 1  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement: StagePlacement = "loop"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward]:
        """Return all microbatches through the rank's first stage, then all through its second stage, and so on."""
        holders = ranks_of_stages(self.placement, num_ranks=num_ranks, stages_per_rank=self.stages_per_rank)
        stages = [stage for stage, holder in enumerate(holders) if holder == rank]
        return (Forward(stage, microbatch) for stage in stages for microbatch in range(num_microbatches))


@final
@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., "GPipe", arXiv:1811.06965).

    With p ranks, m microbatches, a forward of time F and a backward of time B, a step takes (m + p - 1)(F + B).
    """

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """Return all forwards, then all backwards in the same microbatch order."""
        return LoopedBreadthFirst(stages_per_rank=1).actions(rank, num_ranks, num_microbatches)


@final
@dataclass(frozen=True)
class LoopedBreadthFirst(Schedule):
    """All microbatches through one stage of a rank before its next stage (Lamy-Poirier, arXiv:2211.05953).

    Each stage's parameters are needed once in forward and once in backward, so FSDP gathers them twice per step. With v
    stages per rank, the bubble is v times smaller than with GPipe.
    """

    stages_per_rank: int = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """Yield all forwards stage by stage, then all backwards stage by stage in reverse."""
        stages = [index * num_ranks + rank for index in range(self.stages_per_rank)]
        microbatches = range(num_microbatches)
        yield from (Forward(stage, microbatch) for stage in stages for microbatch in microbatches)
        yield from (Backward(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches)
