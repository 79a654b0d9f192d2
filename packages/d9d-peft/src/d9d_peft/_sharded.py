"""Whole tensors into the parts that ranks hold, and back: the only place that looks into a `DTensor`."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def local_region(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, not copied, and where in the whole it lies. Local."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    region = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return tensor.to_local().detach(), region


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank. Collective over the mesh of a `DTensor`, local otherwise."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Set a tensor, of which this rank may hold a part, from the whole of its values. Local."""
    local, region = local_region(tensor)
    local.copy_(values[region])


@torch.no_grad()
def row_norms(weight_OI: Tensor, part: Tensor | None = None) -> Tensor:
    """The Euclidean norms of all rows [O] of a weight, in float32 at least. Collective over its mesh if it is sharded.

    Args:
        weight_OI: The weight [O, I].
        part: What stands for this rank's part of the weight; `None` for that part itself.
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
