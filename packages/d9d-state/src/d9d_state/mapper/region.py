"""A box of a tensor: what of it is wanted, read or held."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor.

    Attributes:
        offsets: First index in each dim.
        sizes: Number of indices in each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Region":
        """All of a tensor of some shape."""
        return Region((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """How many elements are in it."""
        return prod(self.sizes)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether it is all of a tensor of some shape."""
        return self.sizes == tuple(shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of some shape has all of it."""
        return len(self.sizes) == len(shape) and all(
            0 <= offset <= offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a tensor that shows this region only."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor

    def replaced(self, dim: int, offset: int, size: int) -> "Region":
        """The region with another range in one dim, counted from 0."""
        return Region(
            (*self.offsets[:dim], offset, *self.offsets[dim + 1 :]), (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        )

    def inserted(self, dim: int, offset: int, size: int) -> "Region":
        """The region of a tensor with one more dim, before `dim`."""
        return Region((*self.offsets[:dim], offset, *self.offsets[dim:]), (*self.sizes[:dim], size, *self.sizes[dim:]))

    def removed(self, dim: int) -> "Region":
        """The region of a tensor without this dim."""
        return Region((*self.offsets[:dim], *self.offsets[dim + 1 :]), (*self.sizes[:dim], *self.sizes[dim + 1 :]))

    def permuted(self, dims: Sequence[int]) -> "Region":
        """The region with its dims in another order, as `Tensor.permute` takes it."""
        return Region(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))
