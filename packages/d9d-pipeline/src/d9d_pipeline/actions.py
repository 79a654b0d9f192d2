"""The actions that a rank performs in a step; a program is a list of them per rank.

A schedule yields only the computations: `Forward`, `Backward` or its two halves, each alone or inside an `Overlap`.
`build` adds the loss and the transfers.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final


@dataclass(frozen=True, slots=True)
class StageAction:
    """Action of one stage on one microbatch.

    Attributes:
        stage: Global index of the stage.
        microbatch: Index of the microbatch within the step.
    """

    letter: ClassVar[str]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class PeerAction(StageAction):
    """Send or receive of a stage for one microbatch.

    Attributes:
        peer: Pipeline rank that receives or sends.
    """

    peer: int

    def __str__(self) -> str:
        return f"{self.letter[0]}{self.microbatch}{self.letter[1]}{self.peer}"


@final
class Forward(StageAction):
    """Run a stage's forward pass on a microbatch."""

    letter = "F"


@final
class Backward(StageAction):
    """Compute the gradients of a stage's inputs and parameters for a microbatch."""

    letter = "B"


@final
class BackwardInput(StageAction):
    """Compute the gradients of a stage's inputs for a microbatch, and defer the gradients of its parameters."""

    letter = "I"


@final
class BackwardWeight(StageAction):
    """Compute the deferred parameter gradients of a stage for a microbatch, after its `BackwardInput`."""

    letter = "W"


@final
class ComputeLoss(StageAction):
    """Pass the last stage's output of a microbatch to the output handler, which returns the loss in training."""

    letter = "L"


@final
class SendOutput(PeerAction):
    """Send a stage's output to the rank of the next stage."""

    letter = "f>"


@final
class ReceiveInput(PeerAction):
    """Receive a stage's input from the rank of the previous stage."""

    letter = "f<"


@final
class SendInputGradient(PeerAction):
    """Send the gradients of a stage's inputs to the rank of the previous stage."""

    letter = "b>"


@final
class ReceiveOutputGradient(PeerAction):
    """Receive the gradients of a stage's outputs from the rank of the next stage."""

    letter = "b<"


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
    return (action,) if isinstance(action, Part) else ()
