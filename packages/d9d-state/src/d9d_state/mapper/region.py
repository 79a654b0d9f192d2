"""`Region`: a rectangular part of a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Region:
    """Rectangular part of a tensor.

    Attributes:
        offsets: First index in each dim.
        sizes: Number of indices in each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Region":
        """Return the region that covers a tensor of the given shape."""
        return Region((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Return True if the region covers a tensor of the given shape."""
        return self.sizes == tuple(shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return True if the region lies inside a tensor of the given shape."""
        return len(self.sizes) == len(shape) and all(
            0 <= offset <= offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor that covers this region."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor

    def replaced(self, dim: int, offset: int, size: int) -> "Region":
        """Return the region with a different offset and size in one dim, counted from 0."""
        return Region(
            (*self.offsets[:dim], offset, *self.offsets[dim + 1 :]), (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        )

    def inserted(self, dim: int, offset: int, size: int) -> "Region":
        """Return the region with a new dim inserted before `dim`."""
        return Region((*self.offsets[:dim], offset, *self.offsets[dim:]), (*self.sizes[:dim], size, *self.sizes[dim:]))

    def removed(self, dim: int) -> "Region":
        """Return the region without one dim."""
        return Region((*self.offsets[:dim], *self.offsets[dim + 1 :]), (*self.sizes[:dim], *self.sizes[dim + 1 :]))

    def permuted(self, dims: Sequence[int]) -> "Region":
        """Return the region with permuted dims, as for `Tensor.permute`."""
        return Region(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))
