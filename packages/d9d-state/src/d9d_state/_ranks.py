"""Rank, number of ranks, mesh and common failure of a job, with or without a distributed context."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from d9d_dist import DistributedContext, UserError, agree
from d9d_state.errors import Errors, StateError, UnreadableError, as_state_error


def rank_of(ctx: DistributedContext | None) -> int:
    """Return the rank of this process; 0 without a context."""
    return 0 if ctx is None else ctx.rank


def num_ranks(ctx: DistributedContext | None) -> int:
    """Return the number of ranks; raise `ValueError` if there are several but `ctx` is `None`."""
    if ctx is not None:
        return ctx.world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"got no ctx on {dist.get_world_size()} ranks; pass the DistributedContext as ctx.")
    return 1


def is_main(ctx: DistributedContext | None) -> bool:
    """Return True on the main process, which writes the files that are shared by the whole job."""
    return ctx is None or ctx.is_main_process


def mesh_shape(ctx: DistributedContext | None) -> dict[str, int]:
    """Return the size of every mesh axis; empty for a single process without a context."""
    if ctx is None:
        return {}
    mesh = ctx.mesh_for("regular")
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


@contextmanager
def failing_together(
    ctx: DistributedContext | None,
    what: str | None = None,
    *,
    errors: Errors = (OSError, UnreadableError),
    group: dist.ProcessGroup | None = None,
) -> Generator[None]:
    """Run the body, then raise `StateError` on every rank if the body failed on any rank. Collective.

    Without a context, only this process takes part. With `what`, `errors` get the text `what: error`. Other
    `StateError`s keep their text, and `UserError`s also their type. Any other exception is raised at once, without a
    collective.
    """
    problem: str | UserError | None = None
    try:
        with nullcontext() if what is None else as_state_error(what, errors):
            yield
    except UserError as error:
        problem = error
    except StateError as error:
        problem = str(error)
    agree(problem, group, error=StateError, alone=ctx is None)
