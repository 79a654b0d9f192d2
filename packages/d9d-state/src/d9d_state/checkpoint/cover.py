"""Check that regions cover a tensor without gaps or overlaps."""

from collections.abc import Sequence
from math import prod

from d9d_dist import Region


def cover_problem(shape: tuple[int, ...], regions: Sequence[Region]) -> str | None:
    """Return `None` if non-empty regions cover every element of a tensor exactly once, else an error text."""
    for region in regions:
        if not (len(region.offsets) == len(region.sizes) == len(shape)) or region.num_elements == 0:
            return f"the chunk {_text(region)} is empty or has other dims than the shape {list(shape)}."
        if not region.is_within(shape):
            return f"the chunk {_text(region)} exceeds the shape {list(shape)}."
    overlap = _overlap(regions)
    if overlap is not None:
        return f"the chunks {_text(overlap[0])} and {_text(overlap[1])} overlap."
    covered = sum(region.num_elements for region in regions)
    if covered != prod(shape):
        return f"its chunks contain {covered} of {prod(shape)} elements."
    return None


def _overlap(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Return two overlapping regions, or `None`. Sweeps along the dim with the most distinct offsets."""
    if len(regions) < 2:
        return None
    sweep = max(
        range(len(regions[0].sizes)), key=lambda dim: len({region.offsets[dim] for region in regions}), default=None
    )
    if sweep is None:
        return regions[0], regions[1]
    active: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offsets[sweep]):
        active = [other for other in active if other.offsets[sweep] + other.sizes[sweep] > region.offsets[sweep]]
        for other in active:
            if region.intersect(other):
                return other, region
        active.append(region)
    return None


def _text(region: Region) -> str:
    return f"{list(region.sizes)} at {list(region.offsets)}"
