"""Shares whole matrices out to the ranks that hold parts of them: each rank computes with some, and none with all."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_loop.optimizers.local_box import own_part, whole_of

Compute: TypeAlias = Callable[[Tensor], Tensor]
"""A function of a matrix, or of a stack of them, to one of the same shape."""


def map_matrices(compute: Compute, parts: Sequence[Tensor], likes: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Apply a function to whole matrices of which every rank gives its part.

    Matrices that one axis of a mesh splits are dealt out to its ranks: a matrix goes to its owner, and the result comes
    back, by two all-to-alls for as many matrices as there are ranks. Those that several axes split are gathered on
    every rank, by an all-gather for each axis. Those that no axis splits, or only between a stack's matrices, stay.

    Args:
        compute: What to apply.
        parts: This rank's parts, plain tensors.
        likes: Tensors that are split as they are; in the same order on every rank of a mesh.

    Returns:
        Positions and this rank's parts of the results, in any order.
    """
    dealt: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
    for index, (part, like) in enumerate(zip(parts, likes, strict=True)):
        axes = _splitting_axes(like)
        if len(axes) == 1 and _plain_dim(like, axes[0]) is not None:
            assert isinstance(like, DTensor)
            dealt[like.device_mesh, axes[0], part.dtype].append(index)
        elif axes:
            yield index, own_part(compute(whole_of(part, like)), like)
        else:
            yield index, compute(part)
    for (mesh, axis, _), indices in dealt.items():
        size = mesh.size(axis)
        for begin in range(0, len(indices), size):
            batch = indices[begin : begin + size]
            results = _deal(compute, [parts[i] for i in batch], [likes[i] for i in batch], mesh=mesh, axis=axis)
            yield from zip(batch, results, strict=True)


def _deal(
    compute: Compute, parts: Sequence[Tensor], likes: Sequence[Tensor], *, mesh: DeviceMesh, axis: int
) -> list[Tensor]:
    """Apply a function to at most as many matrices as an axis has ranks, one on each."""
    group, size, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    given = [part.numel() for part in parts] + [0] * (size - len(parts))
    dim = _plain_dim(likes[rank], axis) if rank < len(likes) else None
    # What each rank holds of the matrix that this rank owns.
    shapes = [] if dim is None else _chunk_shapes(likes[rank].shape, size, dim)
    owned = [shape.numel() for shape in shapes] + [0] * (size - len(shapes))
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(owned))
    dist.all_to_all_single(received, sent, owned, given, group=group)
    if dim is not None:
        pieces = zip(received.split(owned[: len(shapes)]), shapes, strict=True)
        whole = compute(torch.cat([piece.view(shape) for piece, shape in pieces], dim))
        received = torch.cat([chunk.reshape(-1) for chunk in whole.chunk(size, dim)])
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, received, given, owned, group=group)
    return [result.view(part.shape) for result, part in zip(back.split(given[: len(parts)]), parts, strict=True)]


def _chunk_shapes(shape: torch.Size, num_chunks: int, dim: int) -> list[torch.Size]:
    """Shapes of the chunks of a tensor, those that are empty left out."""
    return [chunk.shape for chunk in torch.empty(shape, device="meta").chunk(num_chunks, dim)]


def _splitting_axes(like: Tensor) -> list[int]:
    """The mesh axes that split matrices themselves, not only a stack of them."""
    if not isinstance(like, DTensor):
        return []
    return [
        axis
        for axis, placement in enumerate(like.placements)
        if not placement.is_replicate() and not (_is_plain(placement) and placement.dim < like.ndim - 2)
    ]


def _plain_dim(like: Tensor, axis: int) -> int | None:
    """The dim that an axis splits, if it does so as `torch.chunk` would, and no other axis splits anything."""
    assert isinstance(like, DTensor)
    placement = like.placements[axis]
    others = (other for number, other in enumerate(like.placements) if number != axis)
    return placement.dim if _is_plain(placement) and all(other.is_replicate() for other in others) else None


def _is_plain(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement splits as `torch.chunk` does; a strided shard is a subclass of Shard in some torches."""
    return isinstance(placement, Shard) and not isinstance(placement, _StridedShard)
