"""Distribution of computations on whole matrices over the ranks that hold their shards."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_dist import full_tensor
from d9d_dist.shards import from_local, local_part

Compute: TypeAlias = Callable[[Tensor], Tensor]
"""Function from a matrix, or a stack of matrices, to a tensor of the same shape."""


def map_matrices(compute: Compute, parts: Sequence[Tensor], likes: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Apply a function to whole matrices that are sharded over ranks; yield (index into `parts`, shard of the result).

    Matrices sharded along a single mesh axis are distributed over its ranks. Each rank receives at most one whole
    matrix, and sends back the shards of the result: two all-to-alls per batch of `axis size` matrices. Matrices sharded
    in any other way are all-gathered and computed on every rank. Unsharded matrices, and stacks sharded only between
    their matrices, are computed locally without collectives. Results come in any order.

    `parts` are this rank's local shards, as plain tensors. `likes` are tensors with the global shapes and placements of
    the matrices, in the same order on every rank of a mesh.
    """
    assigned: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
    for index, (part, like) in enumerate(zip(parts, likes, strict=True)):
        axes = _splitting_axes(like)
        if len(axes) == 1 and _plain_dim(like, axes[0]) is not None:
            assert isinstance(like, DTensor)
            assigned[like.device_mesh, axes[0], part.dtype].append(index)
        elif axes:
            yield index, local_part(compute(full_tensor(from_local(part, like))), like)
        else:
            yield index, compute(part)
    for (mesh, axis, _), indices in assigned.items():
        size = mesh.size(axis)
        for begin in range(0, len(indices), size):
            batch = indices[begin : begin + size]
            results = _compute_on_owners(
                compute, [parts[i] for i in batch], [likes[i] for i in batch], mesh=mesh, axis=axis
            )
            yield from zip(batch, results, strict=True)


def _compute_on_owners(
    compute: Compute, parts: Sequence[Tensor], likes: Sequence[Tensor], *, mesh: DeviceMesh, axis: int
) -> list[Tensor]:
    """Apply a function to at most `axis size` matrices, one per rank. Two all-to-alls over the axis."""
    group, size, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    given = [part.numel() for part in parts] + [0] * (size - len(parts))
    dim = _plain_dim(likes[rank], axis) if rank < len(likes) else None
    # Shapes of all ranks' shards of the matrix that this rank owns.
    shapes: list[torch.Size] = []
    if dim is not None:
        shapes = [chunk.shape for chunk in torch.empty(likes[rank].shape, device="meta").chunk(size, dim)]
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


def _splitting_axes(like: Tensor) -> list[int]:
    """Return the mesh axes that shard the matrices themselves, not only the stack dims."""
    if not isinstance(like, DTensor):
        return []
    return [
        axis
        for axis, placement in enumerate(like.placements)
        if not placement.is_replicate() and not (_is_plain(placement) and placement.dim < like.ndim - 2)
    ]


def _plain_dim(like: Tensor, axis: int) -> int | None:
    """Return the dim that only `axis` shards, in chunks like `torch.chunk`; `None` for any other sharding."""
    assert isinstance(like, DTensor)
    placement = like.placements[axis]
    others = (other for number, other in enumerate(like.placements) if number != axis)
    return placement.dim if _is_plain(placement) and all(other.is_replicate() for other in others) else None


def _is_plain(placement: Placement) -> TypeGuard[Shard]:
    """Return True if a placement shards like `torch.chunk`; in some torch versions `_StridedShard` is a `Shard`."""
    return isinstance(placement, Shard) and not isinstance(placement, _StridedShard)
