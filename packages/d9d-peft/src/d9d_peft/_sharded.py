"""Conversion between full tensors and the local shards of a `DTensor`; all access to shards is in this file."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def local_region(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, without a copy, and its slices in the full tensor. Local."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    region = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return tensor.to_local().detach(), region


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on all ranks. Collective over the mesh of a `DTensor`, local for a plain tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Set this rank's part of `tensor` from the full `values`. Local."""
    local, region = local_region(tensor)
    local.copy_(values[region])


@torch.no_grad()
def row_norms(weight_OI: Tensor, part: Tensor | None = None) -> Tensor:
    """Compute the Euclidean norms of all rows of a weight, in at least float32.

    Collective over the mesh of a sharded weight: one all-reduce of [O] per mesh axis that shards it.

    Args:
        weight_OI: Weight [O, I].
        part: Values that replace this rank's part of the weight; `None` for the weight's own values.

    Returns:
        Norms [O] of the full rows, on all ranks.
    """
    local, (rows, _) = local_region(weight_OI)
    values = local if part is None else part
    dtype = torch.promote_types(values.dtype, torch.float32)
    squares_O = torch.zeros(weight_OI.shape[0], dtype=dtype, device=local.device)
    squares_O[rows] = torch.linalg.vector_norm(values, dim=1, dtype=dtype).square()
    if isinstance(weight_OI, DTensor):
        for axis, placement in enumerate(weight_OI.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares_O, group=weight_OI.device_mesh.get_group(axis))
    return squares_O.sqrt()
