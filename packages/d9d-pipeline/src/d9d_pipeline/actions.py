"""Actions that a rank performs in a step; a program is a list of them per rank.

A schedule yields only the computations: `Forward`, `Backward` or its two halves, and `Overlap` of a forward and a
backward. `build` adds the loss and the transfers.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final


@dataclass(frozen=True, slots=True)
class StageAction:
    """Action of one stage (global index) on one microbatch (index within the step)."""

    letter: ClassVar[str]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class PeerAction(StageAction):
    """Send or receive of a stage for one microbatch; `peer` is the pipeline rank at the other end."""

    peer: int

    def __str__(self) -> str:
        return f"{self.letter[0]}{self.microbatch}{self.letter[1]}{self.peer}"


@final
class Forward(StageAction):
    """Forward pass of a stage on a microbatch."""

    letter = "F"


@final
class Backward(StageAction):
    """Backward pass: gradients of a stage's inputs and parameters for a microbatch."""

    letter = "B"


@final
class BackwardInput(StageAction):
    """First half of a backward: gradients of a stage's inputs; those of its parameters are deferred."""

    letter = "I"


@final
class BackwardWeight(StageAction):
    """Second half of a backward, after its `BackwardInput`: the deferred gradients of a stage's parameters."""

    letter = "W"


@final
class ComputeLoss(StageAction):
    """Call of the output handler with the last stage's output; in training the handler returns the loss."""

    letter = "L"


@final
class SendOutput(PeerAction):
    """Send of a stage's output to the rank of the next stage."""

    letter = "f>"


@final
class ReceiveInput(PeerAction):
    """Receive of a stage's input from the rank of the previous stage."""

    letter = "f<"


@final
class SendInputGradient(PeerAction):
    """Send of the gradients of a stage's inputs to the rank of the previous stage."""

    letter = "b>"


@final
class ReceiveOutputGradient(PeerAction):
    """Receive of the gradients of a stage's outputs from the rank of the next stage."""

    letter = "b<"


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """Forward and backward of different stages or microbatches, which may run at the same time."""

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
    """Return the computations of an action in sequential order: two for an `Overlap`, none for a loss or a transfer."""
    if isinstance(action, Overlap):
        return action.forward, action.backward
    return (action,) if isinstance(action, Part) else ()
