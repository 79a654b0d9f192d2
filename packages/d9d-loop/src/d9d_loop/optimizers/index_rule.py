"""Flat indices, in the full tensor, of the elements of this rank's shard.

Stochastic rounding draws its random numbers by these indices, so results do not depend on the sharding. An `IndexRule`
encodes the indices as three integers, for kernels; `d9d_dist.indexed_blocks` returns them as tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from d9d_dist import Region, local_region


class IndexRule(NamedTuple):
    """Map from the index i of an element to its flat index in the full tensor: `offset + i // run * stride + i % run`.

    Attributes:
        run: Number of consecutive elements that are contiguous in the full tensor.
        stride: Distance in the full tensor between the starts of consecutive runs.
    """

    offset: int
    run: int
    stride: int


def index_rules(tensor: Tensor) -> list[tuple[int, IndexRule]]:
    """Return the index rules of this rank's shard of a tensor, for any sharding; empty for an empty shard.

    The result has pairs of a number of elements and their rule, in the order of the flattened shard. There are several
    pairs only if a tensor of three or more dims is sharded along several of them.
    """
    region = local_region(tensor)
    if not region.num_elements:
        return []
    dims = _merged(region, tensor.shape)
    # (first index, shard size, full size) of each dim; the last dim varies fastest
    *outer, (row_start, row_size, row_total), (start, run, stride) = [(0, 1, 1), (0, 1, 1), *dims][-max(len(dims), 2) :]
    places = [0]
    for first, size, total in outer:
        places = [place * total + first + i for place in places for i in range(size)]
    offsets = [(place * row_total + row_start) * stride + start for place in places]
    return [(row_size * run, IndexRule(offset, run, stride)) for offset in offsets]


def _merged(region: Region, shape: torch.Size) -> list[tuple[int, int, int]]:
    """Return (first index, shard size, full size) of each dim, after merging each unsharded dim into the previous."""
    merged: list[tuple[int, int, int]] = []
    for offset, size, total in zip(region.offsets, region.sizes, shape, strict=True):
        if merged and size == total:
            outer_offset, outer_size, outer_total = merged[-1]
            merged[-1] = (outer_offset * total, outer_size * total, outer_total * total)
        else:
            merged.append((offset, size, total))
    return merged


def global_indices(rule: IndexRule, begin: int, end: int, device: torch.device) -> Tensor:
    """Map the indices [begin, end) by a rule; return flat indices in the full tensor, int64 [end - begin]."""
    i = torch.arange(begin, end, device=device)
    if rule.run == rule.stride or end <= rule.run:
        return i.add_(rule.offset)
    return i.div(rule.run, rounding_mode="floor").mul_(rule.stride - rule.run).add_(i).add_(rule.offset)
