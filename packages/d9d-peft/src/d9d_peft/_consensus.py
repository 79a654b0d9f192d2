"""What ranks decide together, so that none of them leaves while the others wait for it in a collective."""

from typing import TypeVar

from d9d_dist import DistributedContext, UserError, all_gather_objects

_T = TypeVar("_T")


def exchange(value: _T, ctx: DistributedContext | None) -> list[_T]:
    """The value of every rank, on every rank. Collective.

    Args:
        value: This rank's.
        ctx: The ranks; `None` for this process alone.
    """
    return [value] if ctx is None or ctx.world_size == 1 else all_gather_objects(value)


def agree(problem: str | None, ctx: DistributedContext | None, *, error: type[Exception] = UserError) -> None:
    """Go on only if no rank has a problem. Collective.

    Args:
        problem: What is wrong on this rank; `None` if nothing is.
        ctx: The ranks; `None` for this process alone.
        error: What to raise on every rank.
    """
    problems = {rank: text for rank, text in enumerate(exchange(problem, ctx)) if text is not None}
    if not problems:
        return
    if len(set(problems.values())) == 1:
        raise error(next(iter(problems.values())))
    raise error("; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
