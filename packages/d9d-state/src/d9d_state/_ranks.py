"""Number of ranks, main process and mesh of a job, with or without a distributed context."""

import torch.distributed as dist

from d9d_dist import DistributedContext


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
