"""A program: every action of every rank in a step, as data that can be checked, simulated, drawn and run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from d9d_dist import UserError
from d9d_pipeline._transfers import with_transfers
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Loss,
    Overlap,
    Transfer,
    parts,
)
from d9d_pipeline.schedule import Schedule, ranks_of_stages
from d9d_pipeline.verify import refuse, verify


@final
@dataclass(frozen=True, slots=True)
class Program:
    """The actions of a step. Made by `build`.

    Attributes:
        ranks: For each pipeline rank its actions, in order.
        stage_ranks: For each stage the rank that holds it.
        num_microbatches: Number of microbatches of the step.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks together."""
        return len(self.stage_ranks)

    @property
    def trains(self) -> bool:
        """Whether anything goes backward."""
        backward = Backward | BackwardInput | BackwardWeight | Overlap
        return any(isinstance(action, backward) for actions in self.ranks for action in actions)

    @property
    def splits(self) -> bool:
        """Whether some backward is split into its halves."""
        return any(
            isinstance(part, BackwardInput) for actions in self.ranks for action in actions for part in parts(action)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def computed(self, rank: int) -> Iterator[Compute]:
        """What a rank computes, in order: its actions without loss and transfers."""
        return (action for action in self.ranks[rank] if not isinstance(action, Loss | Transfer))

    def __str__(self) -> str:
        """One line for each rank, e.g. `rank 0: F0 F1 B0 B1`; with several stages on a rank, `2.F0` names stage 2."""
        several = self.num_stages > len(self.ranks)
        return "\n".join(
            f"rank {rank}: " + " ".join(_name(action, several=several) for action in self.computed(rank))
            for rank in range(len(self.ranks))
        )


def build(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    """Turn a schedule into a program: add loss and transfers, and prove that it is right.

    Programs of schedules that compare by value, as frozen dataclasses do, are kept and given again.

    Args:
        schedule: Emits what each rank computes.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches of a step.

    Raises:
        UserError: If the schedule does not exist for these numbers.
        ProgramError: Listing what is missing, repeated, on the wrong rank or never possible; or if a rank holds more
            than the schedule's `max_activations`.
    """
    built = _build_once if _compares_by_value(schedule) else _build
    return built(schedule, num_ranks, num_microbatches)


def _build(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Program:
    if num_ranks < 1 or num_microbatches < 1:
        raise UserError(f"got {num_ranks} ranks and {num_microbatches} microbatches; expected at least one of each.")
    stage_ranks = ranks_of_stages(schedule.placement, num_ranks=num_ranks, stages_per_rank=schedule.stages_per_rank)
    computed = [tuple(schedule.actions(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
    refuse([problem for rank in range(num_ranks) for problem in _emitted_wrongly(computed[rank], rank, stage_ranks)])
    program = Program(with_transfers(computed, stage_ranks), stage_ranks, num_microbatches)
    verify(program, max_activations=schedule.max_activations)
    return program


_build_once = lru_cache(maxsize=32)(_build)


def _compares_by_value(schedule: Schedule) -> bool:
    """Whether an equal schedule is the same schedule, now and later."""
    try:
        return hash(schedule) != object.__hash__(schedule)
    except TypeError:  # it is not frozen, or something in it is not
        return False


def _emitted_wrongly(actions: Sequence[Compute], rank: int, stage_ranks: Sequence[int]) -> Iterator[str]:
    """What loss and transfers cannot be derived from."""
    own = {stage for stage, holder in enumerate(stage_ranks) if holder == rank}
    for action in actions:
        computed = parts(action)
        if not computed:
            yield f"rank {rank} has {action!r}, expected what is computed: build adds loss and transfers"
        for part in computed:
            if part.stage not in own:
                yield f"rank {rank} has {action!r}, not its own: it holds the stages {sorted(own)}"


def _name(action: Compute, *, several: bool) -> str:
    return "+".join(f"{part.stage}.{part}" for part in parts(action)) if several else str(action)
