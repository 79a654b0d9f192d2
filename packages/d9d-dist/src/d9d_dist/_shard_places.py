"""Positions of this rank's shard in the full tensor, for all placements of FSDP2 and tensor parallelism."""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_dist.errors import UserError


def global_places(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return, for each dim, the positions of this rank's shard in the full tensor, int64 on the CPU.

    The positions are not contiguous if a split is strided. They are computed by splitting the range of all positions
    with torch's own code for splitting values.

    Args:
        tensor: A DTensor, or a plain tensor, which every rank holds in full.
        name: Name of the tensor, for the error.

    Raises:
        UserError: If the placements disagree with the local shape, because several mesh axes split one dim unevenly.
    """
    places = [torch.arange(size, device="cpu") for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return places
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            parts, _ = placement._split_tensor(
                places[dim].view(*(1,) * dim, -1), tensor.device_mesh.size(axis), with_padding=False
            )
            places[dim] = parts[tensor.device_mesh.get_local_rank(axis)].flatten()
    held = tuple(tensor.to_local().shape)
    if held != tuple(map(len, places)):
        raise UserError(
            f"{name} has the shape {tuple(tensor.shape)}, and this rank holds {held} of it, but its placements give "
            f"{tuple(map(len, places))}: the size is not divisible by the axes that shard one dim, and each axis "
            "rounds up. torch cannot gather such a parameter. Choose a size that is a multiple of their "
            "product, or reduce a degree."
        )
    return places


def copy_part_(tensor: DTensor, full: torch.Tensor, name: str) -> None:
    """Copy this rank's shard of a full tensor into a DTensor of the same shape. No collectives.

    Raises:
        UserError: If the placements disagree with the local shape, see `global_places`.
    """
    for dim, places in enumerate(global_places(tensor, name)):
        if len(places) < full.shape[dim]:
            full = full.index_select(dim, places.to(full.device))
    tensor.to_local().copy_(full)
