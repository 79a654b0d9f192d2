"""Preconditions, effects and rank of each action: the rules that `verify` applies."""

from dataclasses import dataclass
from typing import Any, TypeAlias, final

from d9d_pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeLoss,
    Forward,
    Part,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    Transfer,
)

# Facts about a microbatch on a stage, known on the rank of the stage; a bit mask.
HAS_INPUT, FORWARD_DONE, LOSS_DONE, SENT_OUTPUT = 1, 2, 4, 8
HAS_GRADIENT, BACKWARD_DONE, HAS_WEIGHT_GRADIENTS, SENT_GRADIENT = 16, 32, 64, 128

Single: TypeAlias = Part | ComputeLoss | Transfer
"""An action other than `Overlap`."""


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """Precondition and effect of an action, as facts about the action's (stage, microbatch) pair.

    The facts in `needs` must hold before the action. The facts in `makes` hold after the action, and must not hold
    before.

    Attributes:
        towards: Offset of the adjacent stage that the action sends to or receives from: 1 is the next stage, -1 the
            previous one, 0 none.
        hands: The fact that the action makes true for that adjacent stage if both stages are on one rank.
        counterpart: For a transfer, the type of the peer's action.
    """

    needs: int
    makes: int
    lacks: str = ""
    towards: int = 0
    hands: int = 0
    holds: int = 0
    counterpart: type[Transfer] | None = None


RULES: dict[type[Any], Rule] = {
    Forward: Rule(HAS_INPUT, FORWARD_DONE, "its input is available", towards=1, hands=HAS_INPUT, holds=1),
    ComputeLoss: Rule(FORWARD_DONE, LOSS_DONE | HAS_GRADIENT, "its forward"),
    Backward: Rule(
        FORWARD_DONE | HAS_GRADIENT,
        BACKWARD_DONE | HAS_WEIGHT_GRADIENTS,
        "its forward, or the gradient of its output is available",
        towards=-1,
        hands=HAS_GRADIENT,
        holds=-1,
    ),
    BackwardInput: Rule(
        FORWARD_DONE | HAS_GRADIENT,
        BACKWARD_DONE,
        "its forward, or the gradient of its output is available",
        towards=-1,
        hands=HAS_GRADIENT,
    ),
    BackwardWeight: Rule(BACKWARD_DONE, HAS_WEIGHT_GRADIENTS, "its BackwardInput", holds=-1),
    SendOutput: Rule(FORWARD_DONE, SENT_OUTPUT, "its forward", towards=1, counterpart=ReceiveInput),
    ReceiveInput: Rule(0, HAS_INPUT, towards=-1, counterpart=SendOutput),
    SendInputGradient: Rule(
        BACKWARD_DONE, SENT_GRADIENT, "its backward", towards=-1, counterpart=ReceiveOutputGradient
    ),
    ReceiveOutputGradient: Rule(0, HAS_GRADIENT, towards=1, counterpart=SendInputGradient),
}

TRANSFERS = (SendOutput, ReceiveInput, SendInputGradient, ReceiveOutputGradient)

Placed: TypeAlias = dict[tuple[type[Any], int], tuple[int, int | None]]
"""Rank and, for a transfer, peer by action type and stage. An action without an entry belongs on no rank."""


def places(stage_ranks: tuple[int, ...]) -> Placed:
    """Return the rank and peer of each action type on each stage."""
    found: Placed = {}
    last = len(stage_ranks) - 1
    for stage, rank in enumerate(stage_ranks):
        for kind, rule in RULES.items():
            neighbor = stage + rule.towards
            if rule.counterpart is None:
                if kind is not ComputeLoss or stage == last:
                    found[kind, stage] = rank, None
            elif 0 <= neighbor <= last and stage_ranks[neighbor] != rank:
                found[kind, stage] = rank, stage_ranks[neighbor]
    return found
