"""Position of this rank's shard in the full tensor, for computations whose result must not depend on the sharding."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class LocalBox(NamedTuple):
    """A box-shaped region of a tensor.

    Attributes:
        offsets: First index in each dim of the full tensor.
        sizes: Size of the box in each dim; at least one is 0 if a rank holds no elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_box(tensor: Tensor) -> LocalBox:
    """Return the box of this rank's shard of a DTensor; for a plain tensor, the whole tensor."""
    if not isinstance(tensor, DTensor):
        return LocalBox((0,) * tensor.ndim, tuple(tensor.shape))
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalBox(tuple(offsets), tuple(sizes))


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """All-gather the full tensor from the local shards of all ranks.

    Collective over the mesh axes that shard `like`.

    Args:
        part: This rank's local shard, a plain tensor.
        like: Tensor with the shape and placements of the full tensor.

    Returns:
        The full tensor as a plain tensor, equal on every rank.
    """
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return a view of this rank's shard of a full tensor.

    Args:
        whole: Full tensor, a plain tensor.
        like: Tensor with the placements of the shard.
    """
    box = local_box(like)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)
    return whole


class IndexRule(NamedTuple):
    """Maps the index i of an element to its flat index in the full tensor: `offset + i // run * stride + i % run`.

    Attributes:
        offset: Flat index of the first element in the full tensor.
        run: Number of consecutive elements that are contiguous in the full tensor.
        stride: Distance in the full tensor between the starts of consecutive runs.
    """

    offset: int
    run: int
    stride: int


def index_rules(tensor: Tensor) -> list[tuple[int, IndexRule]]:
    """Return the index rules of this rank's shard of a tensor, for any sharding.

    Args:
        tensor: DTensor or plain tensor of any number of dims.

    Returns:
        Pairs of a number of elements and their rule, which cover the elements of the flattened shard in order. There is
        one rule, unless a tensor of three or more dims is sharded along several of them. Empty for an empty shard.
    """
    box = local_box(tensor)
    if 0 in box.sizes:
        return []
    dims = _merged(box, tuple(tensor.shape))
    # (first index, shard size, full size) of each dim; the last dim varies fastest
    *outer, (row_start, row_size, row_total), (start, run, stride) = [(0, 1, 1), (0, 1, 1), *dims][-max(len(dims), 2) :]
    places = [0]
    for first, size, total in outer:
        places = [place * total + first + i for place in places for i in range(size)]
    offsets = [(place * row_total + row_start) * stride + start for place in places]
    return [(row_size * run, IndexRule(offset, run, stride)) for offset in offsets]


def _merged(box: LocalBox, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return (first index, shard size, full size) of each dim, after merging each unsharded dim into the previous."""
    merged: list[tuple[int, int, int]] = []
    for offset, size, total in zip(*box, shape, strict=True):
        if merged and size == total:
            outer_offset, outer_size, outer_total = merged[-1]
            merged[-1] = (outer_offset * total, outer_size * total, outer_total * total)
        else:
            merged.append((offset, size, total))
    return merged


def global_indices(rule: IndexRule, begin: int, end: int, device: torch.device) -> Tensor:
    """Return the global indices of the elements [begin, end) that follow a rule, as int64 [end - begin]."""
    i = torch.arange(begin, end, device=device)
    if rule.run == rule.stride or end <= rule.run:
        return i.add_(rule.offset)
    return i.div(rule.run, rounding_mode="floor").mul_(rule.stride - rule.run).add_(i).add_(rule.offset)
