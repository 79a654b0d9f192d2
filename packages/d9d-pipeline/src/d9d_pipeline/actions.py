"""What a rank can be told to do in a step: the words that programs are made of.

A schedule emits what is computed: `Forward`, and `Backward` or its two halves, alone or in an `Overlap`. `build` adds
the loss and the transfers, which follow from it.
"""

from dataclasses import dataclass
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage on a microbatch.

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
    """Compute the gradients of a stage for a microbatch, of its inputs and of its parameters.

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
    """Compute the gradients of a stage's inputs for a microbatch; those of its parameters are left for later.

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
    """Compute the gradients of a stage's parameters for a microbatch whose `BackwardInput` is done.

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
    """A forward and a backward that have nothing to do with each other, computed at the same time.

    Attributes:
        forward: The one.
        backward: The other, of another stage or of another microbatch.
    """

    forward: Forward
    backward: Backward | BackwardInput

    def __str__(self) -> str:
        return f"({self.forward}+{self.backward})"


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """Give the last stage's output of a microbatch away: to the loss, or to whoever handles results.

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
    """Send what a stage's forward gave to the rank of the next stage.

    Attributes:
        stage: The stage whose output it is.
        microbatch: Index of the microbatch within the step.
        peer: The rank that receives it.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"f{self.microbatch}>{self.peer}"


@final
@dataclass(frozen=True, slots=True)
class ReceiveInput:
    """Receive what a stage's forward needs from the rank of the stage before it.

    Attributes:
        stage: The stage whose input it is.
        microbatch: Index of the microbatch within the step.
        peer: The rank that sends it.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"f{self.microbatch}<{self.peer}"


@final
@dataclass(frozen=True, slots=True)
class SendInputGradient:
    """Send the gradients of a stage's inputs to the rank of the stage before it.

    Attributes:
        stage: The stage whose inputs' gradients they are.
        microbatch: Index of the microbatch within the step.
        peer: The rank that receives them.
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
        stage: The stage whose outputs' gradients they are.
        microbatch: Index of the microbatch within the step.
        peer: The rank that sends them.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"b{self.microbatch}<{self.peer}"


Part: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
"""One computation of one stage on one microbatch."""

Compute: TypeAlias = Part | Overlap
"""What a schedule emits."""

Transfer: TypeAlias = SendOutput | ReceiveInput | SendInputGradient | ReceiveOutputGradient
"""What passes between ranks."""

Action: TypeAlias = Compute | Loss | Transfer
"""What a program consists of."""


def parts(action: Action) -> tuple[Part, ...]:
    """The single computations of an action, in the order in which they are done where nothing can overlap.

    None of a loss or a transfer.
    """
    if isinstance(action, Overlap):
        return action.forward, action.backward
    return (action,) if isinstance(action, _PARTS) else ()


_PARTS = (Forward, Backward, BackwardInput, BackwardWeight)
