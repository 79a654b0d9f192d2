"""All forwards, then all backwards: the simplest schedules, and the ones that hold every microbatch at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import Backward, Forward
from d9d_pipeline.schedule import Placement, Schedule, ranks_of_stages


@final
@dataclass(frozen=True)
class ForwardOnly(Schedule):
    """Inference and evaluation: each microbatch goes forward once.

    Attributes:
        stages_per_rank: How many stages each rank holds.
        placement: Which ones: those of the schedule that trains the model.
    """

    stages_per_rank: int = 1  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement: Placement = "loop"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward]:
        """One microbatch after the other through the first stage of the rank, then through its second, ..."""
        holders = ranks_of_stages(self.placement, num_ranks=num_ranks, stages_per_rank=self.stages_per_rank)
        for stage, holder in enumerate(holders):
            for microbatch in range(num_microbatches if holder == rank else 0):
                yield Forward(stage, microbatch)


@final
@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., "GPipe", arXiv:1811.06965).

    With a forward of time F and a backward of time B, a step of p ranks takes (m + p - 1)(F + B).
    """

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """All forwards, then all backwards, first in first out."""
        for microbatch in range(num_microbatches):
            yield Forward(rank, microbatch)
        for microbatch in range(num_microbatches):
            yield Backward(rank, microbatch)


@final
@dataclass(frozen=True)
class LoopedBreadthFirst(Schedule):
    """All microbatches through one stage of the rank before the next (Lamy-Poirier, arXiv:2211.05953).

    A stage's parameters are needed once forward and once backward, which suits fully sharded ones. With v stages on a
    rank, the bubble is v times smaller than GPipe's.

    Attributes:
        stages_per_rank: How many stages each rank holds.
    """

    stages_per_rank: int = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """Stage by stage forward, then stage by stage backward."""
        stages = [turn * num_ranks + rank for turn in range(self.stages_per_rank)]
        for stage in stages:
            for microbatch in range(num_microbatches):
                yield Forward(stage, microbatch)
        for stage in reversed(stages):
            for microbatch in range(num_microbatches):
                yield Backward(stage, microbatch)
