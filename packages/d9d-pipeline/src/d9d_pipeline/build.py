"""Conversion of a schedule to a verified program."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from d9d_dist import UserError
from d9d_pipeline._transfers import with_transfers
from d9d_pipeline.actions import Compute, parts
from d9d_pipeline.program import Program
from d9d_pipeline.schedule import Schedule, ranks_of_stages
from d9d_pipeline.verify import refuse, verify


def build(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    """Turn a schedule into a program: add the loss and transfers, and verify the result.

    Programs are cached for schedules that compare by value, as frozen dataclasses do.

    Raises:
        UserError: If the schedule does not support this number of ranks or microbatches.
        ProgramError: If actions are missing, repeated, on the wrong rank or in an impossible order, or if a rank holds
            more activations than the schedule's `max_activations`. The message lists the problems.
    """
    built = _build_once if _compares_by_value(schedule) else _build
    return built(schedule, num_ranks, num_microbatches)


def _build(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Program:
    if num_ranks < 1 or num_microbatches < 1:
        raise UserError(f"got {num_ranks} ranks and {num_microbatches} microbatches; expected at least one of each.")
    stage_ranks = ranks_of_stages(schedule.placement, num_ranks=num_ranks, stages_per_rank=schedule.stages_per_rank)
    computed = [tuple(schedule.actions(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
    refuse([problem for rank in range(num_ranks) for problem in _emission_problems(computed[rank], rank, stage_ranks)])
    program = Program(with_transfers(computed, stage_ranks), stage_ranks, num_microbatches)
    verify(program, max_activations=schedule.max_activations)
    return program


_build_once = lru_cache(maxsize=32)(_build)


def _compares_by_value(schedule: Schedule) -> bool:
    """Return True if the schedule is hashable by value, so that equal schedules can share a cached program."""
    try:
        return hash(schedule) != object.__hash__(schedule)
    except TypeError:  # the schedule, or one of its fields, is unhashable
        return False


def _emission_problems(actions: Sequence[Compute], rank: int, stage_ranks: Sequence[int]) -> Iterator[str]:
    """Yield a message for each action that is not a computation, or is of a stage on another rank."""
    own = {stage for stage, holder in enumerate(stage_ranks) if holder == rank}
    for action in actions:
        computed = parts(action)
        if not computed:
            yield f"rank {rank} has {action!r}, expected computations only: build adds the loss and transfers"
        for part in computed:
            if part.stage not in own:
                yield f"rank {rank} has {action!r}, but it only holds the stages {sorted(own)}"
