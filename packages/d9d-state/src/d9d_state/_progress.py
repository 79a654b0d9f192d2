"""Progress bars for reads and writes: one per rank on a terminal, none elsewhere."""

import torch.distributed as dist
from tqdm import tqdm


def byte_bar(what: str, num_bytes: int, *, visible: bool) -> tqdm:
    """Return a progress bar over bytes. The ranks of a node use one line each; a closed bar disappears."""
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
