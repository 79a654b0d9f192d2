"""Adapters from torch's pipeline schedules to `Schedule`: an independent implementation for comparison."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from torch.distributed.pipelining import schedules

from d9d_pipeline import Backward, BackwardInput, BackwardWeight, Forward, Schedule
from d9d_pipeline.actions import Compute

_KINDS: dict[str, type[Any]] = {
    "FORWARD": Forward,
    "FULL_BACKWARD": Backward,
    "BACKWARD_INPUT": BackwardInput,
    "BACKWARD_WEIGHT": BackwardWeight,
}


def _order(kind: type[Any], rank: int, **attributes: int) -> Iterable[Compute]:
    """Return the computations of a torch schedule on a rank, without creating stages for its constructor."""
    schedule = kind.__new__(kind)
    vars(schedule).update(attributes)
    for action in schedule._calculate_single_rank_operations(rank):
        if action is not None:
            yield _KINDS[action.computation_type.name](action.stage_index, action.microbatch_index)


@final
@dataclass(frozen=True)
class TorchInterleavedZeroBubble(Schedule):
    """`ScheduleInterleavedZeroBubble`; the number of microbatches must be a multiple of `num_ranks`."""

    stages_per_rank: int = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        """Return the order of torch."""
        return _order(
            schedules.ScheduleInterleavedZeroBubble,
            rank,
            n_local_stages=self.stages_per_rank,
            pp_group_size=num_ranks,
            microbatches_per_round=num_ranks,
            _n_microbatches=num_microbatches,
        )


@final
@dataclass(frozen=True)
class TorchZeroBubbleV(Schedule):
    """`ScheduleZBVZeroBubble`."""

    stages_per_rank = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement = "v"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        """Return the order of torch."""
        return _order(
            schedules.ScheduleZBVZeroBubble,
            rank,
            n_local_stages=2,
            num_stages=2 * num_ranks,
            pp_group_size=num_ranks,
            _n_microbatches=num_microbatches,
        )
