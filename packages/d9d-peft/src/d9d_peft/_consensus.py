"""Collective error handling: all ranks raise together, so that no rank blocks in a collective after another failed."""

from typing import TypeVar

from d9d_dist import DistributedContext, UserError, all_gather_objects

_T = TypeVar("_T")


def all_gather(value: _T, ctx: DistributedContext | None) -> list[_T]:
    """Return the values of all ranks, in rank order. Collective over the job: one all-gather of objects.

    Args:
        value: Value of this rank.
        ctx: Distributed context; `None` for a single process.
    """
    return [value] if ctx is None or ctx.world_size == 1 else all_gather_objects(value)


def raise_on_all_ranks(
    message: str | None, ctx: DistributedContext | None, *, error: type[Exception] = UserError
) -> None:
    """Raise an error on all ranks if at least one rank has an error message. Collective over the job.

    Args:
        message: Error message of this rank; `None` if there is no error.
        ctx: Distributed context; `None` for a single process.
        error: Type of the error.

    Raises:
        Exception: Of type `error`, with the messages of all ranks.
    """
    messages = {rank: text for rank, text in enumerate(all_gather(message, ctx)) if text is not None}
    if not messages:
        return
    if len(set(messages.values())) == 1:
        raise error(next(iter(messages.values())))
    raise error("; ".join(f"rank {rank}: {text}" for rank, text in messages.items()))
