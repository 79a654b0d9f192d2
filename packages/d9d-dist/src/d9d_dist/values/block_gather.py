"""Gather of a sharded tensor with little temporary memory: a few blocks in addition to the result."""

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d_dist.shards import Region, full_tensor, local_region, local_tensor

BLOCK_BYTES = 8 * 2**20
"""Default block size. A tensor of at most this size is gathered by `full_tensor`."""


@torch.no_grad()
def gather_in_blocks(tensor: Tensor, *, block_bytes: int = BLOCK_BYTES) -> Tensor:
    """Return the full tensor on every rank, detached: `full_tensor` with temporary memory of a few blocks.

    The buffers of an all-gather take as much memory as the result, and more on multi-dimensional meshes. Here each
    shard is broadcast block by block, along one axis after the other. The result may share memory with the argument.

    Collective over the mesh of a DTensor: for each shard and block, a broadcast over each axis that shards the tensor.

    Raises:
        UserError: If the tensor is larger than a block, and a placement is `Partial` or a shard is not one region.
    """
    if not isinstance(tensor, DTensor) or tensor.numel() * tensor.itemsize <= block_bytes:
        return full_tensor(tensor)
    mesh, mine = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    local = local_tensor(tensor).detach()
    own = local_region(tensor)
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    assert mine is not None, "ranks outside the mesh have no part of the tensor"
    for places in product(*(range(mesh.size(axis)) for axis in axes)):
        owner = list(mine)
        for axis, place in zip(axes, places, strict=True):
            owner[axis] = place
        region = local_region(tensor, coordinate=owner)
        for block in _blocks(region, block_bytes // tensor.itemsize):
            buffer = (
                block.relative_to(own).of(local).contiguous()
                if owner == list(mine)
                else torch.empty(block.sizes, dtype=tensor.dtype, device=local.device)
            )
            for number, axis in enumerate(axes):
                # After this broadcast, the ranks with the owner's coordinates on all later axes have the block.
                if all(mine[later] == owner[later] for later in axes[number + 1 :]):
                    dist.broadcast(buffer, group=mesh.get_group(axis), group_src=owner[axis])
            block.of(full).copy_(buffer)
    return full


def _blocks(region: Region, num_elements: int) -> list[Region]:
    """Split a region along its longest dim into blocks of at most about `num_elements` elements."""
    if not region.num_elements:
        return []
    dim = max(range(len(region.sizes)), key=lambda each: region.sizes[each])
    size = region.sizes[dim]
    step = max(1, num_elements * size // region.num_elements)
    return [
        region.replaced(dim, region.offsets[dim] + start, min(step, size - start)) for start in range(0, size, step)
    ]
