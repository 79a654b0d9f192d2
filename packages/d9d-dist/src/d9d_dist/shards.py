"""This rank's part of a `DTensor`. Only this module computes positions from placements.

A rank's part is the Cartesian product of one list of positions per dim (`local_positions`), computed by torch's own
split. With FSDP2 and tensor parallelism the positions are consecutive, so the part is a `Region`; a strided split
without its outer split has gaps. A plain tensor counts as a `DTensor` that every rank holds in full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_dist.errors import UserError

_BLOCK_ELEMENTS = 1 << 20


@final
@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Rectangular part of a tensor: the first index and the number of indices in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Region":
        """Return the region that covers a tensor of this shape."""
        return Region((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the region, one slice per dim."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Return True if the region covers a tensor of this shape."""
        return self.sizes == tuple(shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return True if the region lies inside a tensor of this shape."""
        return len(self.sizes) == len(shape) and all(
            0 <= part.start <= part.stop <= size for part, size in zip(self.slices, shape, strict=True)
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor that covers this region."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor

    def intersect(self, other: "Region") -> "Region | None":
        """Return the intersection of two regions; `None` if it is empty."""
        pairs = list(zip(self.slices, other.slices, strict=True))
        offsets = tuple(max(one.start, two.start) for one, two in pairs)
        sizes = tuple(min(one.stop, two.stop) - offset for (one, two), offset in zip(pairs, offsets, strict=True))
        return Region(offsets, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, outer: "Region") -> "Region":
        """Return the region with offsets relative to a region that contains it."""
        return Region(
            tuple(offset - first for offset, first in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def replaced(self, dim: int, offset: int, size: int) -> "Region":
        """Return the region with another offset and size in one dim."""
        return self.removed(dim).inserted(dim, offset, size)

    def inserted(self, dim: int, offset: int, size: int) -> "Region":
        """Return the region with a new dim inserted before `dim`."""
        return Region((*self.offsets[:dim], offset, *self.offsets[dim:]), (*self.sizes[:dim], size, *self.sizes[dim:]))

    def removed(self, dim: int) -> "Region":
        """Return the region without one dim."""
        return Region((*self.offsets[:dim], *self.offsets[dim + 1 :]), (*self.sizes[:dim], *self.sizes[dim + 1 :]))

    def permuted(self, dims: Sequence[int]) -> "Region":
        """Return the region with permuted dims, as for `Tensor.permute`."""
        return Region(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory, or a plain tensor unchanged. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank, detached. Collective over the mesh of a DTensor; local for a plain tensor.

    The result may share memory with the argument.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's shard in a DTensor with the shape and placements of `like`; the inverse of `local_tensor`.

    If `like` is a plain tensor, return the shard itself. No collectives, and no sharding propagation, which takes
    seconds on a mesh of many axes.
    """
    if not isinstance(like, DTensor):
        return shard
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def local_positions(tensor: Tensor, name: str = "a tensor", *, coordinate: Sequence[int] | None = None) -> list[Tensor]:
    """Return, for each dim, the ascending positions of this rank's shard in the full tensor, int64 on the CPU.

    A rank outside the mesh of a DTensor has no positions. `name` is the name of the tensor in errors. With
    `coordinate`, return the positions of the rank at this coordinate of the mesh.

    Raises:
        UserError: If a placement is Partial, or the local shape disagrees with the placements because several mesh axes
            split one dim unevenly.
    """
    positions = [torch.arange(size, device="cpu") for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return positions
    mesh = tensor.device_mesh
    mine = mesh.get_coordinate()
    if mine is None:
        return [places[:0] for places in positions]
    coordinate = mine if coordinate is None else coordinate
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UserError(
                f"{name} has the placements {tensor.placements}; expected only Shard and Replicate. Sum the tensor "
                "over the ranks first, with redistribute."
            )
        if isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            parts, _ = placement._split_tensor(
                positions[dim].view(*(1,) * dim, -1), mesh.size(axis), with_padding=False
            )
            positions[dim] = parts[coordinate[axis]].flatten()
    held = tuple(tensor.to_local().shape)
    if list(coordinate) == list(mine) and held != tuple(map(len, positions)):
        raise UserError(
            f"{name} has the shape {tuple(tensor.shape)}, and this rank has a shard of shape {held}, but the "
            f"placements imply {tuple(map(len, positions))}: several axes shard one dim whose size their product does "
            "not divide. torch cannot gather such a parameter. Choose a size that is a multiple of the product, or "
            "lower a degree."
        )
    return positions


def local_region(tensor: Tensor, name: str = "a tensor", *, coordinate: Sequence[int] | None = None) -> Region:
    """Return the region of the full tensor that this rank, or the rank at `coordinate`, holds. No collectives.

    Raises `UserError`, with `name`, if the positions have gaps, and as `local_positions` does.
    """
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    positions = local_positions(tensor, name, coordinate=coordinate)
    if not all(map(_is_consecutive, positions)):
        raise UserError(
            f"{name} has the placements {tensor.placements}, which give this rank rows that are not consecutive; "
            "expected one region per rank. Redistribute it to Shard placements."
        )
    return Region(tuple(int(places[0]) if len(places) else 0 for places in positions), tuple(map(len, positions)))


def local_part(full: Tensor, like: Tensor, name: str = "a tensor") -> Tensor:
    """Return the part of `full` at the positions of this rank's shard of `like`: a view if the part is one region.

    `full` is a plain tensor of the shape of `like`, on any device. No collectives. Raises `UserError` as
    `local_positions` does.
    """
    for dim, places in enumerate(local_positions(like, name)):
        if _is_consecutive(places):
            full = full.narrow(dim, int(places[0]) if len(places) else 0, len(places))
        else:
            full = full.index_select(dim, places.to(full.device))
    return full


@torch.no_grad()
def copy_from_full_(tensor: Tensor, full: Tensor, name: str = "a tensor") -> None:
    """Copy this rank's part (`local_part`) of a full tensor into a tensor of the same shape. No collectives."""
    local_tensor(tensor).copy_(local_part(full, tensor, name))


def is_first_replica(tensor: DTensor) -> bool:
    """Return True on one rank for each shard: the rank at coordinate 0 of all axes that replicate the shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        place for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def indexed_blocks(tensor: Tensor, name: str = "a tensor") -> Iterator[tuple[Tensor, Tensor]]:
    """Split this rank's shard into blocks of at most 2^20 elements, in order; errors are those of `local_positions`.

    Yields:
        Each block, a view of the shard, and the flat index of its elements in the full tensor, int64 of the same shape.
    """
    local = local_tensor(tensor)
    positions = [places.to(local.device) for places in local_positions(tensor, name)]
    if local.numel():
        yield from _blocks(local, positions, tensor.shape, torch.zeros((), dtype=torch.int64, device=local.device))


def _blocks(
    local: Tensor, positions: Sequence[Tensor], shape: Sequence[int], index: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the last dims of a shard; `index` is the 0-dim flat index of this part in the preceding dims."""
    if local.numel() <= _BLOCK_ELEMENTS:
        for size, places in zip(shape, positions, strict=True):
            index = index.unsqueeze(-1) * size + places
        yield local, index
    elif rows := _BLOCK_ELEMENTS * len(local) // local.numel():
        for block, places in zip(local.split(rows), positions[0].split(rows), strict=True):
            yield from _blocks(block, [places, *positions[1:]], shape, index)
    else:
        for row, place in zip(local, positions[0], strict=True):
            yield from _blocks(row, positions[1:], shape[1:], index * shape[0] + place)


def _is_consecutive(ascending: Tensor) -> bool:
    return not len(ascending) or int(ascending[-1] - ascending[0]) == len(ascending) - 1
