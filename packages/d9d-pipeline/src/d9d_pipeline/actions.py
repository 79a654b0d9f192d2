"""The actions that a rank performs in a step; a program is a list of them per rank.

A schedule yields only the computations: `Forward`, `Backward` or its two halves, each alone or inside an `Overlap`.
`build` adds the loss and the transfers.
"""

from dataclasses import dataclass
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's forward pass on a microbatch.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.microbatch}"


@final
@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of a stage's inputs and parameters for a microbatch.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.microbatch}"


@final
@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Compute the gradients of a stage's inputs for a microbatch, and defer the gradients of its parameters.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"I{self.microbatch}"


@final
@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Compute the deferred parameter gradients of a stage for a microbatch, after its `BackwardInput`.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"W{self.microbatch}"


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """An independent forward and backward that may run at the same time.

    Attributes:
        forward: The forward.
        backward: The backward, of another stage or another microbatch than the forward.
    """

    forward: Forward
    backward: Backward | BackwardInput

    def __str__(self) -> str:
        return f"({self.forward}+{self.backward})"


@final
@dataclass(frozen=True, slots=True)
class ComputeLoss:
    """Pass the last stage's output of a microbatch to the output handler, which returns the loss in training.

    Attributes:
        stage: Global index of the last stage.
        microbatch: Index of the microbatch within the step.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"L{self.microbatch}"


@final
@dataclass(frozen=True, slots=True)
class SendOutput:
    """Send a stage's output to the rank of the next stage.

    Attributes:
        stage: Global index of the stage that computed the output.
        microbatch: Index of the microbatch within the step.
        peer: Pipeline rank that receives the output.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"f{self.microbatch}>{self.peer}"


@final
@dataclass(frozen=True, slots=True)
class ReceiveInput:
    """Receive a stage's input from the rank of the previous stage.

    Attributes:
        stage: Global index of the stage that consumes the input.
        microbatch: Index of the microbatch within the step.
        peer: Pipeline rank that sends the input.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"f{self.microbatch}<{self.peer}"


@final
@dataclass(frozen=True, slots=True)
class SendInputGradient:
    """Send the gradients of a stage's inputs to the rank of the previous stage.

    Attributes:
        stage: Global index of the stage whose inputs the gradients belong to.
        microbatch: Index of the microbatch within the step.
        peer: Pipeline rank that receives the gradients.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"b{self.microbatch}>{self.peer}"


@final
@dataclass(frozen=True, slots=True)
class ReceiveOutputGradient:
    """Receive the gradients of a stage's outputs from the rank of the next stage.

    Attributes:
        stage: Global index of the stage whose outputs the gradients belong to.
        microbatch: Index of the microbatch within the step.
        peer: Pipeline rank that sends the gradients.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"b{self.microbatch}<{self.peer}"


Part: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
"""One computation of one stage on one microbatch."""

Compute: TypeAlias = Part | Overlap
"""A computation that a schedule may yield."""

Transfer: TypeAlias = SendOutput | ReceiveInput | SendInputGradient | ReceiveOutputGradient
"""A send or receive between two pipeline ranks."""

Action: TypeAlias = Compute | ComputeLoss | Transfer
"""Any action of a program."""


def parts(action: Action) -> tuple[Part, ...]:
    """Return the computations of an action, in the order in which they run if they cannot overlap.

    An `Overlap` has two. A loss or a transfer has none.
    """
    if isinstance(action, Overlap):
        return action.forward, action.backward
    return (action,) if isinstance(action, _PARTS) else ()


_PARTS = (Forward, Backward, BackwardInput, BackwardWeight)
