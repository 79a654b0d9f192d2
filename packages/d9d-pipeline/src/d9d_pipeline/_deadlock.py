"""Deadlock detection, assuming that each transfer blocks both of its ranks until it completes."""

from collections.abc import Sequence

from d9d_pipeline._action_rules import RULES
from d9d_pipeline._transfers import with_transfers
from d9d_pipeline.actions import Action, Transfer
from d9d_pipeline.program import Program


def deadlock_problems(program: Program) -> list[str]:
    """Return one line with the ranks and transfers of a deadlock, or an empty list if there is no deadlock.

    Apart from deadlocks, the program must be correct. If exactly one rank orders its transfers differently from
    `build`, the line starts with this rank. Ranks outside the cycle are not named.
    """
    blocked = _blocked_transfers(program.ranks)
    if not blocked:
        return []
    cycle = _find_cycle(blocked, start=_moved_rank(program))
    before = [cycle[-1], *cycle[:-1]]  # before[i] is the rank that waits for cycle[i]
    orders = [
        f"rank {rank} has {blocked[rank]!r} before {_counterpart(blocked[waiting], waiting)!r}"
        for rank, waiting in zip(cycle, before, strict=True)
    ]
    return [f"{', and '.join(orders)}: these ranks wait for each other forever"]


def _blocked_transfers(ranks: Sequence[Sequence[Action]]) -> dict[int, Transfer]:
    """Return the transfer that each rank blocks on; ranks that finish have no entry."""
    transfers = [[action for action in actions if isinstance(action, Transfer)] for actions in ranks]
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


def _find_cycle(blocked: dict[int, Transfer], *, start: int | None) -> list[int]:
    """Return a cycle of ranks: each waits for the next one, and the last for the first."""
    rank = start if start in blocked else next(iter(blocked))
    seen: list[int] = []
    while rank not in seen:  # each blocked rank waits for another blocked one
        seen.append(rank)
        rank = blocked[rank].peer
    return seen[seen.index(rank) :]


def _moved_rank(program: Program) -> int | None:
    """Return the only rank whose transfers are ordered differently from `build`; `None` if there are several."""
    computed = [tuple(program.computed(rank)) for rank in range(len(program.ranks))]
    expected = with_transfers(computed, program.stage_ranks)
    moved = [rank for rank, actions in enumerate(program.ranks) if actions != expected[rank]]
    return moved[0] if len(moved) == 1 else None


def _counterpart(action: Transfer, rank: int) -> Transfer:
    """Return the peer's action in a transfer of `rank`."""
    rule = RULES[type(action)]
    assert rule.counterpart is not None, "every transfer has a counterpart"
    return rule.counterpart(action.stage + rule.towards, action.microbatch, rank)
