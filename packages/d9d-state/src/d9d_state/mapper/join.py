"""Operations that join tensors and split them again: stack and unstack, concat and split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import Shape, common_dtype, infos_of, normalized_dim, resized, same_shapes, sized_dim
from d9d_state.mapper.operation import OneInput, Piece
from d9d_state.mapper.state_mapper import StateMapper, leaf
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Stack:
    dim: int
    count: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        return (torch.stack(tensors, dim=self.dim),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        shape = same_shapes(inputs)
        dim = normalized_dim(self.dim, len(shape) + 1)
        return (TensorInfo((*shape[:dim], self.count, *shape[dim:]), common_dtype(inputs)),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> Iterator[Piece]:
        dim = normalized_dim(self.dim, len(inputs[0].shape) + 1)
        part, first = region.removed(dim), region.offsets[dim]
        return (Piece(first + index, part, target.select(dim, index)) for index in range(region.sizes[dim]))

    def inverse(self) -> "_Unstack":
        return _Unstack(self.dim, self.count)

    def describe(self) -> str:
        return f"stack(dim={self.dim})"


@final
@dataclass(frozen=True, slots=True)
class _Unstack(OneInput):
    dim: int
    count: int

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (resized(shape, sized_dim(shape, self.dim, self.count)),) * self.count

    def move(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.unbind(tensor, dim=self.dim))

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        dim = normalized_dim(self.dim, len(shape))
        return region.inserted(dim, output, 1), target.unsqueeze(dim)

    def inverse(self) -> "_Stack":
        return _Stack(self.dim, self.count)

    def describe(self) -> str:
        return f"unstack(dim={self.dim})"


@final
@dataclass(frozen=True, slots=True)
class _Concat:
    dim: int
    sizes: tuple[int, ...] | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        return (torch.cat(tensors, dim=self.dim),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        first = inputs[0].shape
        dim = normalized_dim(self.dim, len(first))
        if any(len(info.shape) != len(first) for info in inputs):
            same_shapes(inputs)
        got = tuple(info.shape[dim] for info in inputs)
        if self.sizes is not None and got != self.sizes:
            raise ValueError(f"got sizes {list(got)} in dim {self.dim}; expected {list(self.sizes)}.")
        if any(info.shape[:dim] != first[:dim] or info.shape[dim + 1 :] != first[dim + 1 :] for info in inputs):
            shapes = dict.fromkeys(str(list(info.shape)) for info in inputs)
            raise ValueError(f"got shapes {' and '.join(shapes)}; expected equal shapes except in dim {self.dim}.")
        return (TensorInfo((*first[:dim], sum(got), *first[dim + 1 :]), common_dtype(inputs)),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> Iterator[Piece]:
        dim = normalized_dim(self.dim, len(inputs[0].shape))
        first, end = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
        start = 0
        for index, info in enumerate(inputs):
            low, high = max(start, first), min(start + info.shape[dim], end)
            if low < high:
                part = region.replaced(dim, low - start, high - low)
                yield Piece(index, part, target.narrow(dim, low - first, high - low))
            start += info.shape[dim]

    def inverse(self) -> "_Split":
        if self.sizes is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as concat(..., sizes=[...]).")
        return _Split(self.dim, self.sizes)

    def describe(self) -> str:
        return f"concat(dim={self.dim})" if self.sizes is None else f"concat(dim={self.dim}, sizes={list(self.sizes)})"


@final
@dataclass(frozen=True, slots=True)
class _Split(OneInput):
    dim: int
    sizes: tuple[int, ...]

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        dim = normalized_dim(self.dim, len(shape))
        if shape[dim] != sum(self.sizes):
            raise ValueError(
                f"dim {self.dim} of shape {list(shape)} must have size {sum(self.sizes)}, "
                f"the sum of {list(self.sizes)}."
            )
        return tuple(resized(shape, dim, size) for size in self.sizes)

    def move(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(tensor, list(self.sizes), dim=self.dim))

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        dim = normalized_dim(self.dim, len(shape))
        start = sum(self.sizes[:output]) + region.offsets[dim]
        return region.replaced(dim, start, region.sizes[dim]), target

    def inverse(self) -> "_Concat":
        return _Concat(self.dim, self.sizes)

    def describe(self) -> str:
        return f"split(dim={self.dim}, sizes={list(self.sizes)})"


def stack(srcs: Sequence[str], dst: str, *, dim: int = 0) -> StateMapper:
    """Stack tensors of one shape along a new dim of size `len(srcs)`. The inverse is `unstack`.

    A negative dim counts from the end of the stack's dims.

    Raises:
        ValueError: If `srcs` is empty or contains a name twice.
    """
    return leaf(_Stack(dim, len(srcs)), srcs, [dst])


def unstack(src: str, dsts: Sequence[str], *, dim: int = 0) -> StateMapper:
    """Unbind a tensor along a dim of size `len(dsts)`, negative from the end. The inverse is `stack`.

    Raises:
        ValueError: If `dsts` is empty or contains a name twice.
    """
    return leaf(_Unstack(dim, len(dsts)), [src], dsts)


def concat(srcs: Sequence[str], dst: str, *, dim: int = 0, sizes: Sequence[int] | None = None) -> StateMapper:
    """Concatenate tensors along a dim, negative from the end. The inverse is `split`.

    `sizes` are the sizes of the parts in `dim`. Only the inverse needs them; if given, they are checked.

    Raises:
        ValueError: If `srcs` is empty or contains a name twice, or `sizes` has a different length or a negative size.
    """
    if sizes is not None:
        _refuse_sizes(sizes, len(srcs), what=f"concat into {dst}")
    return leaf(_Concat(dim, None if sizes is None else tuple(sizes)), srcs, [dst])


def split(src: str, dsts: Sequence[str], sizes: Sequence[int], *, dim: int = 0) -> StateMapper:
    """Split a tensor along a dim, negative from the end, into parts of given sizes. The inverse is `concat`.

    Raises:
        ValueError: If `dsts` is empty or contains a name twice, or `sizes` has a different length or a negative size.
    """
    _refuse_sizes(sizes, len(dsts), what=f"split of {src}")
    return leaf(_Split(dim, tuple(sizes)), [src], dsts)


def _refuse_sizes(sizes: Sequence[int], count: int, *, what: str) -> None:
    if len(sizes) != count:
        raise ValueError(f"{what} got {len(sizes)} sizes for {count} tensors; expected one size for each tensor.")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{what} got sizes {list(sizes)}; expected sizes of 0 or more.")
