"""Conversion between full tensors and local shards: the only module that reads a `DTensor`'s layout."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from d9d_state.mapper.region import Region


@torch.no_grad()
def local_part(tensor: Tensor) -> tuple[Region, Tensor]:
    """Return this rank's region of a tensor and the local tensor that stores it.

    Args:
        tensor: Plain tensor, or a `DTensor` with Shard and Replicate placements, on any device. On a rank outside its
            mesh, region and local tensor are empty.

    Raises:
        ValueError: If the tensor is on the meta device or has a Partial placement.
    """
    if tensor.is_meta:
        raise ValueError("the model is on the meta device; materialize it before loading its state.")
    if not isinstance(tensor, DTensor):
        return Region.whole(tuple(tensor.shape)), tensor.detach()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"cannot load into the placements {tensor.placements}; expected Shard and Replicate only.")
    local = tensor.to_local().detach()
    if tensor.device_mesh.get_coordinate() is None:
        return Region((0,) * tensor.ndim, (0,) * tensor.ndim), local.new_empty((0,) * tensor.ndim)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offsets), tuple(sizes)), local


@torch.no_grad()
def gather_whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank. Collective over the mesh of a `DTensor`; local for a plain tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
