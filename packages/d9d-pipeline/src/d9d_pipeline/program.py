"""Program: all actions of all ranks in one step, as data to verify, simulate, plot and execute."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import (
    Action,
    BackwardInput,
    Compute,
    ComputeLoss,
    Forward,
    ReceiveInput,
    SendOutput,
    Transfer,
    parts,
)


@final
@dataclass(frozen=True, slots=True)
class Program:
    """All actions of all ranks in one step, created by `build`.

    Attributes:
        ranks: Actions of each pipeline rank, in execution order.
        stage_ranks: Rank of each stage, indexed by global stage.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def trains(self) -> bool:
        """True if the program contains any backward, or a transfer of a gradient."""
        forward_only = Forward | ComputeLoss | SendOutput | ReceiveInput
        return not all(isinstance(action, forward_only) for actions in self.ranks for action in actions)

    @property
    def splits(self) -> bool:
        """True if the program contains a `BackwardInput`: a backward split into its two halves."""
        return any(
            isinstance(part, BackwardInput) for actions in self.ranks for action in actions for part in parts(action)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the global indices of the stages that a rank holds, in increasing order."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def computed(self, rank: int) -> Iterator[Compute]:
        """Return an iterator over a rank's computations in order, without the loss and transfers."""
        return (action for action in self.ranks[rank] if not isinstance(action, ComputeLoss | Transfer))

    def __str__(self) -> str:
        """Return one line per rank, e.g. `rank 0: F0 F1 B0 B1`.

        With several stages per rank, each action is preceded by its stage: `2.F0` is F0 of stage 2.
        """
        with_stage = self.num_stages > len(self.ranks)
        return "\n".join(
            f"rank {rank}: " + " ".join(_name(action, with_stage=with_stage) for action in self.computed(rank))
            for rank in range(len(self.ranks))
        )


def _name(action: Compute, *, with_stage: bool) -> str:
    return "+".join(f"{part.stage}.{part}" for part in parts(action)) if with_stage else str(action)
