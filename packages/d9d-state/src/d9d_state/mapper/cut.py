"""Operations that cut or extend one dim of a tensor: narrow, select, pad."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import Shape, infos_of, normalized_dim, resized, sized_dim
from d9d_state.mapper.operation import Constant, OneInput, Piece
from d9d_state.mapper.state_mapper import StateMapper, leaf
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Narrow(OneInput):
    dim: int
    start: int
    length: int

    def shapes(self, shape: Shape) -> tuple[Shape]:
        dim = normalized_dim(self.dim, len(shape))
        end = self.start + self.length
        if end > shape[dim]:
            raise ValueError(f"dim {self.dim} of shape {list(shape)} ends before {end}.")
        return (resized(shape, dim, self.length),)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        return (tensor.narrow(self.dim, self.start, self.length),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        dim = normalized_dim(self.dim, len(shape))
        return region.replaced(dim, region.offsets[dim] + self.start, region.sizes[dim]), target

    def inverse(self) -> "_Narrow":
        raise ValueError(
            f"{self.describe()} has no inverse, because values are lost. Use split() and drop() the other parts."
        )

    def describe(self) -> str:
        return f"narrow(dim={self.dim}, start={self.start}, length={self.length})"


@final
@dataclass(frozen=True, slots=True)
class _Select(OneInput):
    dim: int
    index: int

    def shapes(self, shape: Shape) -> tuple[Shape]:
        dim = normalized_dim(self.dim, len(shape))
        if not -shape[dim] <= self.index < shape[dim]:
            raise ValueError(f"dim {self.dim} of shape {list(shape)} has no index {self.index}.")
        return (resized(shape, dim),)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        return (tensor.select(self.dim, self.index),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        dim = normalized_dim(self.dim, len(shape))
        return region.inserted(dim, self.index % shape[dim], 1), target.unsqueeze(dim)

    def inverse(self) -> "_Select":
        raise ValueError(
            f"{self.describe()} has no inverse, because values are lost. Use unstack() and drop() the others."
        )

    def describe(self) -> str:
        return f"select(dim={self.dim}, index={self.index})"


@final
@dataclass(frozen=True, slots=True)
class _Pad:
    dim: int
    size: int
    padded_size: int
    value: float

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        (tensor,) = tensors
        missing = resized(tuple(tensor.shape), self.dim % tensor.ndim, self.padded_size - self.size)
        return (torch.cat([tensor, tensor.new_full(missing, self.value)], dim=self.dim),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        dim = sized_dim(info.shape, self.dim, self.size)
        return (TensorInfo(resized(info.shape, dim, self.padded_size), info.dtype),)

    def pieces(
        self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]
    ) -> Iterator[Piece | Constant]:
        dim = normalized_dim(self.dim, len(inputs[0].shape))
        offset, size = region.offsets[dim], region.sizes[dim]
        held = min(max(self.size - offset, 0), size)
        if held > 0:
            yield Piece(0, region.replaced(dim, offset, held), target.narrow(dim, 0, held))
        if held < size:
            yield Constant(self.value, target.narrow(dim, held, size - held))

    def inverse(self) -> "_Unpad":
        return _Unpad(self)

    def describe(self) -> str:
        return f"pad(dim={self.dim}, {self.size} to {self.padded_size} with {self.value})"


@final
@dataclass(frozen=True, slots=True)
class _Unpad(OneInput):
    padding: _Pad

    def shapes(self, shape: Shape) -> tuple[Shape]:
        dim = sized_dim(shape, self.padding.dim, self.padding.padded_size)
        return (resized(shape, dim, self.padding.size),)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        return (tensor.narrow(self.padding.dim, 0, self.padding.size),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        return region, target

    def inverse(self) -> _Pad:
        return self.padding

    def describe(self) -> str:
        return f"unpad(dim={self.padding.dim}, {self.padding.padded_size} to {self.padding.size})"


def narrow(src: str, dst: str | None = None, *, dim: int = 0, start: int, length: int) -> StateMapper:
    """Take `length` indices of a dim, from `start`. No inverse; `split` with `drop` has one.

    `dst=None` keeps the name. Negative dims count from the end.

    Raises:
        ValueError: If `start` or `length` is negative.
    """
    if start < 0 or length < 0:
        raise ValueError(f"narrow of {src} got start {start} and length {length}; expected both to be 0 or more.")
    return leaf(_Narrow(dim, start, length), [src], [src if dst is None else dst])


def select(src: str, dst: str | None = None, *, dim: int = 0, index: int) -> StateMapper:
    """Take one index of a dim of a tensor and remove the dim. No inverse; `unstack` with `drop` has one.

    `dst=None` keeps the name. A negative dim or index counts from the end.
    """
    return leaf(_Select(dim, index), [src], [src if dst is None else dst])


def pad(
    src: str, dst: str | None = None, *, dim: int = 0, size: int, padded_size: int, value: float = 0
) -> StateMapper:
    """Pad one dim, such as the vocabulary, at its end from `size` to `padded_size`.

    The inverse removes the padding. `dst=None` keeps the name. Negative dims count from the end.

    Raises:
        ValueError: If `size` is negative or above `padded_size`.
    """
    if not 0 <= size <= padded_size:
        raise ValueError(
            f"pad of {src} got size {size} and padded_size {padded_size}; expected 0 <= size <= padded_size."
        )
    return leaf(_Pad(dim, size, padded_size, value), [src], [src if dst is None else dst])
