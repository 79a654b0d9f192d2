"""Whole tensors into the parts that ranks hold, and back: the only place that looks into a `DTensor`."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from d9d_state.mapper.region import Region


@torch.no_grad()
def local_part(tensor: Tensor) -> tuple[Region, Tensor]:
    """What this rank holds of a tensor: which box of the whole, and the plain tensor that stores it.

    Args:
        tensor: On any device; plain, or a `DTensor` that is sharded and replicated. A rank outside its mesh holds an
            empty box.

    Raises:
        ValueError: If the tensor has no storage, or is a sum that is still to be reduced.
    """
    if tensor.is_meta:
        raise ValueError("the model is on the meta device; materialize it before its state is loaded.")
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
    """The whole of a tensor on every rank. Collective over the mesh of a `DTensor`, local otherwise."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
