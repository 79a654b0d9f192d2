"""A program: every action of every rank in a step, as data that can be checked, printed and run."""

from collections import Counter
from dataclasses import dataclass

from d9d_pipeline.actions import Action, Backward, Forward
from d9d_pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of a step. Made by `build`.

    Attributes:
        ranks: For each pipeline rank its actions, in order.
        num_stages: Number of stages of all ranks together.
        num_microbatches: Number of microbatches of the step.
    """

    ranks: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int

    def __str__(self) -> str:
        """One line for each rank, e.g. `rank 0: F0 F1 B0 B1`; with several stages on a rank, `2.F0` names stage 2."""
        several = self.num_stages > len(self.ranks)
        return "\n".join(
            f"rank {rank}: " + " ".join(f"{action.stage}.{action}" if several else str(action) for action in actions)
            for rank, actions in enumerate(self.ranks)
        )


def build(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    """Turn a schedule into a program, and check that it is complete.

    Args:
        schedule: Emits each rank's actions.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches of a step.

    Returns:
        The program.

    Raises:
        ValueError: If an action is missing, repeated, on the wrong rank, or a backward comes before its forward.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(f"got {num_ranks} ranks and {num_microbatches} microbatches; expected at least one of each.")
    ranks = tuple(tuple(schedule.actions(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    program = Program(ranks, num_ranks * schedule.stages_per_rank, num_microbatches)
    if problems := _problems(program):
        raise ValueError(f"{type(schedule).__name__} emits no valid program: {'; '.join(problems)}.")
    return program


def _problems(program: Program) -> list[str]:
    problems: list[str] = []
    trains = any(isinstance(action, Backward) for actions in program.ranks for action in actions)
    for rank, actions in enumerate(program.ranks):
        stages = range(rank, program.num_stages, len(program.ranks))
        cells = {(stage, microbatch) for stage in stages for microbatch in range(program.num_microbatches)}
        expected = {Forward(*cell) for cell in cells} | ({Backward(*cell) for cell in cells} if trains else set())
        counts = Counter(actions)
        problems += [f"rank {rank} lacks {action!r}" for action in sorted(expected - counts.keys(), key=repr)]
        problems += [f"rank {rank} has {action!r}, not its own" for action in counts.keys() - expected]
        problems += [f"rank {rank} repeats {action!r}" for action, count in counts.items() if count > 1]
        problems += _backward_before_forward(rank, actions)
    return problems


def _backward_before_forward(rank: int, actions: tuple[Action, ...]) -> list[str]:
    problems: list[str] = []
    forwarded: set[tuple[int, int]] = set()
    for action in actions:
        cell = (action.stage, action.microbatch)
        if isinstance(action, Forward):
            forwarded.add(cell)
        elif cell not in forwarded:
            problems.append(f"rank {rank} has {action!r} before its forward")
    return problems
