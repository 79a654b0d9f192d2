"""Where in a full tensor this rank's part of it lies, for what must not depend on how the tensor is split."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class LocalBox(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: First index in every dim of the full tensor.
        sizes: Sizes of the box; some of them are 0 where a rank holds nothing.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_box(tensor: Tensor) -> LocalBox:
    """The box that this rank holds; all of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return LocalBox((0,) * tensor.ndim, tuple(tensor.shape))
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalBox(tuple(offsets), tuple(sizes))


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which every rank gives its part, split like another tensor.

    Collective over the axes that split it.

    Args:
        part: This rank's part, a plain tensor.
        like: Says how the full tensor is split.

    Returns:
        A plain tensor, equal on every rank.
    """
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a full tensor, split like another tensor; a view."""
    box = local_box(like)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)
    return whole


class IndexRule(NamedTuple):
    """A rule for the global flat index of element i of a part: `offset + i // run * stride + i % run`.

    Attributes:
        offset: Global index of the first element.
        run: Elements in a row that are neighbours in the full tensor too.
        stride: Distance between the first elements of two runs in the full tensor.
    """

    offset: int
    run: int
    stride: int


def index_rules(tensor: Tensor) -> list[tuple[int, IndexRule]]:
    """Rules for the elements of this rank's part of a tensor, row by row, whatever the full tensor's split.

    Args:
        tensor: Any number of dims.

    Returns:
        How many elements follow a rule, and the rule; together all elements of the part. One rule, unless a tensor of
        three or more dims is split along two of those.
    """
    box = local_box(tensor)
    if 0 in box.sizes:
        return []
    dims = _merged(box, tuple(tensor.shape))
    # (first index, size of the part, size of the whole) of each dim, the last one fastest
    *outer, (row_start, row_size, row_total), (start, run, stride) = [(0, 1, 1), (0, 1, 1), *dims][-max(len(dims), 2) :]
    places = [0]
    for first, size, total in outer:
        places = [place * total + first + i for place in places for i in range(size)]
    offsets = [(place * row_total + row_start) * stride + start for place in places]
    return [(row_size * run, IndexRule(offset, run, stride)) for offset in offsets]


def _merged(box: LocalBox, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """First index, size and full size of each dim, where a dim that is not split is one with the dim before it."""
    merged: list[tuple[int, int, int]] = []
    for offset, size, total in zip(*box, shape, strict=True):
        if merged and size == total:
            outer_offset, outer_size, outer_total = merged[-1]
            merged[-1] = (outer_offset * total, outer_size * total, outer_total * total)
        else:
            merged.append((offset, size, total))
    return merged


def global_indices(rule: IndexRule, begin: int, end: int, device: torch.device) -> Tensor:
    """Global indices of elements `begin` to `end` of a part that follows a rule, int64."""
    i = torch.arange(begin, end, device=device)
    if rule.run == rule.stride or end <= rule.run:
        return i.add_(rule.offset)
    return i.div(rule.run, rounding_mode="floor").mul_(rule.stride - rule.run).add_(i).add_(rule.offset)
