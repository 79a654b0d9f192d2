"""How far a long read or write is, as a bar for each rank on a terminal, and nothing elsewhere."""

import torch.distributed as dist
from tqdm import tqdm


def byte_bar(what: str, num_bytes: int, *, visible: bool) -> tqdm:
    """A bar over bytes, on the line of this rank among those of its node, which goes away when it is full.

    Args:
        what: What is done: `"loading"`.
        num_bytes: All of it.
        visible: Whether to draw it where the standard error is a terminal.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    many = dist.is_initialized() and dist.get_world_size() > 1
    return tqdm(
        total=num_bytes,
        desc=f"rank {rank}: {what}" if many else what,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        position=dist.get_node_local_rank(fallback_rank=0) if many else 0,
        disable=None if visible else True,
    )
