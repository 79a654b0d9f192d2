"""Boxes (rectangular parts) of a tensor, and the check that boxes cover a tensor without gaps or overlaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final


@final
@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Rectangular part of a tensor.

    Attributes:
        offset: First index in every dim of the tensor.
        shape: Size in every dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Check that boxes cover every element of a tensor exactly once.

    Args:
        shape: Shape of the tensor.
        boxes: Boxes in any order; none for a tensor without elements.

    Returns:
        Error text, or `None` if the boxes cover the tensor exactly.
    """
    for box in boxes:
        if not (len(box.offset) == len(box.shape) == len(shape)) or box.num_elements == 0:
            return f"the chunk {_text(box)} is empty or has other dims than the shape {list(shape)}."
        if any(start + size > total for start, size, total in zip(box.offset, box.shape, shape, strict=True)):
            return f"the chunk {_text(box)} exceeds the shape {list(shape)}."
    overlap = _overlap(boxes)
    if overlap is not None:
        return f"the chunks {_text(overlap[0])} and {_text(overlap[1])} overlap."
    covered = sum(box.num_elements for box in boxes)
    if covered != prod(shape):
        return f"its chunks contain {covered} of {prod(shape)} elements."
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two overlapping boxes, or `None`. Sweeps along the dim with the most distinct offsets."""
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0].shape))
    sweep = max(dims, key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
    if sweep is None:
        return boxes[0], boxes[1]
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[sweep]):
        active = [other for other in active if other.offset[sweep] + other.shape[sweep] > box.offset[sweep]]
        for other in active:
            if all(_meet(box, other, dim) for dim in dims):
                return other, box
        active.append(box)
    return None


def _meet(one: Box, other: Box, dim: int) -> bool:
    return (
        one.offset[dim] < other.offset[dim] + other.shape[dim] and other.offset[dim] < one.offset[dim] + one.shape[dim]
    )


def _text(box: Box) -> str:
    return f"{list(box.shape)} at {list(box.offset)}"
