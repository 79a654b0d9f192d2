"""What each action needs and makes true, and on which rank it belongs: the rules that `verify` applies."""

from dataclasses import dataclass
from typing import Any, TypeAlias, final

from d9d_pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Loss,
    Part,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    Transfer,
)

# Facts about a microbatch on a stage, on the rank of the stage.
HAS_INPUT, RAN, GAVE_LOSS, SENT_OUTPUT = 1, 2, 4, 8
HAS_GRADIENT, RAN_BACK, HAS_WEIGHTS, SENT_GRADIENT = 16, 32, 64, 128

Single: TypeAlias = Part | Loss | Transfer
"""An action that is no overlap."""


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """What an action means to its (stage, microbatch).

    Attributes:
        needs: Facts that must be true before.
        makes: Facts that it makes true, and that must not be true before.
        lacks: What is missing if not all of `needs` are true.
        towards: Direction of the neighbour that it sends to or receives from: 1 is the next stage, -1 the previous one.
        hands: The fact that it makes true for that neighbour if both stages are on one rank.
        holds: Change of the number of held activations.
        counterpart: For a transfer, the action of the peer.
    """

    needs: int
    makes: int
    lacks: str = ""
    towards: int = 0
    hands: int = 0
    holds: int = 0
    counterpart: type[Transfer] | None = None


RULES: dict[type[Any], Rule] = {
    Forward: Rule(HAS_INPUT, RAN, "its input is there", towards=1, hands=HAS_INPUT, holds=1),
    Loss: Rule(RAN, GAVE_LOSS | HAS_GRADIENT, "its forward"),
    Backward: Rule(
        RAN | HAS_GRADIENT,
        RAN_BACK | HAS_WEIGHTS,
        "its forward, or the gradient of its output is there",
        towards=-1,
        hands=HAS_GRADIENT,
        holds=-1,
    ),
    BackwardInput: Rule(
        RAN | HAS_GRADIENT,
        RAN_BACK,
        "its forward, or the gradient of its output is there",
        towards=-1,
        hands=HAS_GRADIENT,
    ),
    BackwardWeight: Rule(RAN_BACK, HAS_WEIGHTS, "its backward for the inputs", holds=-1),
    SendOutput: Rule(RAN, SENT_OUTPUT, "its forward", towards=1, counterpart=ReceiveInput),
    ReceiveInput: Rule(0, HAS_INPUT, towards=-1, counterpart=SendOutput),
    SendInputGradient: Rule(RAN_BACK, SENT_GRADIENT, "its backward", towards=-1, counterpart=ReceiveOutputGradient),
    ReceiveOutputGradient: Rule(0, HAS_GRADIENT, towards=1, counterpart=SendInputGradient),
}

TRANSFERS = (SendOutput, ReceiveInput, SendInputGradient, ReceiveOutputGradient)

Placed: TypeAlias = dict[tuple[type[Any], int], tuple[int, int | None]]
"""The rank of each kind of action by stage, and the peer of a transfer. What is not listed belongs on no rank."""


def places(stage_ranks: tuple[int, ...]) -> Placed:
    """Return the place of each kind of action by stage."""
    found: Placed = {}
    last = len(stage_ranks) - 1
    for stage, rank in enumerate(stage_ranks):
        for kind, rule in RULES.items():
            neighbour = stage + rule.towards
            if rule.counterpart is None:
                if kind is not Loss or stage == last:
                    found[kind, stage] = rank, None
            elif 0 <= neighbour <= last and stage_ranks[neighbour] != rank:
                found[kind, stage] = rank, stage_ranks[neighbour]
    return found
