"""What a rank can be told to do in a step: the words that programs are made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage on a microbatch; on the last stage, its loss too.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of a stage for a microbatch, of its inputs and of its parameters.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


Action = Forward | Backward
