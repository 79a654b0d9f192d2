"""Number of ranks and main process of a job, which may have no distributed context."""

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
    """Return True on the main process, which writes the files that the job has only one copy of."""
    return ctx is None or ctx.is_main_process
