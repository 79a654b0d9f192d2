"""Whole tensors into the parts that ranks hold, and back: the only place that looks into a `DTensor`."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy into a tensor, or into the shard of a `DTensor` that this rank holds. Issues no collective.

    Args:
        target: Of the shape of `whole`, on any device.
        whole: The values, of a dtype that converts to the target's.

    Raises:
        ValueError: If the target has no storage, or is a sum that is still to be reduced.
    """
    if target.is_meta:
        raise ValueError("the model is on the meta device; materialize it before its state is loaded.")
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    if any(isinstance(placement, Partial) for placement in target.placements):
        raise ValueError(f"cannot load into the placements {target.placements}; expected Shard and Replicate only.")
    if target.device_mesh.get_coordinate() is None:
        return
    sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = whole
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        part = part.narrow(dim, min(offset, part.shape[dim]), size)
    target.to_local().copy_(part)


@torch.no_grad()
def gather_whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank. Collective over the mesh of a `DTensor`, local otherwise."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
