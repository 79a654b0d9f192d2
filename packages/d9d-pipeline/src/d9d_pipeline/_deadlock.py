"""Ranks that wait for each other, if every transfer blocks both of its ranks until it is done."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from d9d_pipeline._action_rules import RULES, TRANSFERS
from d9d_pipeline._transfers import with_transfers
from d9d_pipeline.actions import Action, Transfer

if TYPE_CHECKING:
    from d9d_pipeline.program import Program


def deadlock_problems(program: "Program") -> list[str]:
    """Return a line that names the ranks of a deadlock and the transfers whose order makes it; nothing if none is.

    The line starts with the one rank that has its transfers elsewhere than `build` puts them, if it is only one. Ranks
    that merely wait for those of the deadlock are not named.

    Args:
        program: Has every action exactly once, and each rank computes in a possible order.
    """
    stuck = _stuck(program.ranks)
    if not stuck:
        return []
    circle = _circle(stuck, start=_moved_rank(program))
    before = [circle[-1], *circle[:-1]]  # of each rank the one that waits for it
    orders = [
        f"rank {rank} has {stuck[rank]!r} before {_counterpart(stuck[waiting], waiting)!r}"
        for rank, waiting in zip(circle, before, strict=True)
    ]
    return [f"{', and '.join(orders)}: they wait for each other for ever"]


def _stuck(ranks: Sequence[Sequence[Action]]) -> dict[int, Transfer]:
    """Return the transfer at which each rank that does not come to its end waits."""
    transfers = [[action for action in actions if isinstance(action, TRANSFERS)] for actions in ranks]
    positions = [0] * len(ranks)
    waits: dict[int, Transfer] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        while positions[rank] < len(transfers[rank]):
            action = transfers[rank][positions[rank]]
            other = waits.get(action.peer)
            if other is None or other != _counterpart(action, rank):
                waits[rank] = action
                break
            del waits[action.peer]
            positions[action.peer] += 1
            ready.append(action.peer)
            positions[rank] += 1
    return waits


def _circle(stuck: dict[int, Transfer], *, start: int | None) -> list[int]:
    """Return ranks of which each waits for the next one, and the last for the first."""
    rank = start if start in stuck else next(iter(stuck))
    seen: list[int] = []
    while rank not in seen:  # each stuck rank waits for another stuck one
        seen.append(rank)
        rank = stuck[rank].peer
    return seen[seen.index(rank) :]


def _moved_rank(program: "Program") -> int | None:
    """Return the one rank whose transfers are not where `build` puts them; `None` if there are several."""
    computed = [tuple(program.computed(rank)) for rank in range(len(program.ranks))]
    expected = with_transfers(computed, program.stage_ranks)
    moved = [rank for rank, actions in enumerate(program.ranks) if actions != expected[rank]]
    return moved[0] if len(moved) == 1 else None


def _counterpart(action: Transfer, rank: int) -> Transfer:
    """Return what the peer does in a transfer of a rank."""
    rule = RULES[type(action)]
    assert rule.counterpart is not None, "a transfer has two sides"
    return rule.counterpart(action.stage + rule.towards, action.microbatch, rank)
