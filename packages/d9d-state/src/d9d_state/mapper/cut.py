"""Operations that cut or extend one dim of a tensor: narrow, select, pad."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import infos_of, normalized_dim, resized
from d9d_state.mapper.graph import StateMapper, leaf
from d9d_state.mapper.operation import Constant, Piece
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Narrow:
    dim: int
    start: int
    length: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        (tensor,) = tensors
        return (tensor.narrow(self.dim, self.start, self.length),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        dim = normalized_dim(self.dim, len(info.shape))
        end = self.start + self.length
        if end > info.shape[dim]:
            raise ValueError(f"dim {self.dim} of shape {list(info.shape)} ends before {end}.")
        return (resized(info, dim, self.length),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        assert output == 0
        dim = normalized_dim(self.dim, len(inputs[0].shape))
        return (Piece(0, region.replaced(dim, region.offsets[dim] + self.start, region.sizes[dim]), target),)

    def inverse(self) -> "_Narrow":
        raise ValueError(
            f"{self.describe()} has no inverse, because values are lost. Use split() and drop() the other parts."
        )

    def describe(self) -> str:
        return f"narrow(dim={self.dim}, start={self.start}, length={self.length})"


@final
@dataclass(frozen=True, slots=True)
class _Select:
    dim: int
    index: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        (tensor,) = tensors
        return (tensor.select(self.dim, self.index),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        dim = normalized_dim(self.dim, len(info.shape))
        if not -info.shape[dim] <= self.index < info.shape[dim]:
            raise ValueError(f"dim {self.dim} of shape {list(info.shape)} has no index {self.index}.")
        return (TensorInfo((*info.shape[:dim], *info.shape[dim + 1 :]), info.dtype),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        assert output == 0
        dim = normalized_dim(self.dim, len(inputs[0].shape))
        return (Piece(0, region.inserted(dim, self.index % inputs[0].shape[dim], 1), target.unsqueeze(dim)),)

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
        (info,) = self.infer(*infos_of(tensors))
        (tensor,) = tensors
        dim = normalized_dim(self.dim, len(info.shape))
        missing = resized(info, dim, self.padded_size - self.size).shape
        return (torch.cat([tensor, tensor.new_full(missing, self.value)], dim=dim),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        return (resized(info, _checked_dim(info, self.dim, self.size), self.padded_size),)

    def pieces(
        self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]
    ) -> Iterator[Piece | Constant]:
        assert output == 0
        dim = normalized_dim(self.dim, len(inputs[0].shape))
        offset, size = region.offsets[dim], region.sizes[dim]
        held = min(max(self.size - offset, 0), size)
        if held > 0:
            yield Piece(0, region.replaced(dim, offset, held), target.narrow(dim, 0, held))
        if held < size:
            yield Constant(self.value, target.narrow(dim, held, size - held))

    def inverse(self) -> "_Unpad":
        return _Unpad(self.dim, self.size, self.padded_size, self.value)

    def describe(self) -> str:
        return f"pad(dim={self.dim}, {self.size} to {self.padded_size} with {self.value})"


@final
@dataclass(frozen=True, slots=True)
class _Unpad:
    dim: int
    size: int
    padded_size: int
    value: float

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.infer(*infos_of(tensors))
        (tensor,) = tensors
        return (tensor.narrow(self.dim, 0, self.size),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        return (resized(info, _checked_dim(info, self.dim, self.padded_size), self.size),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        assert output == 0
        assert len(inputs) == 1
        return (Piece(0, region, target),)

    def inverse(self) -> _Pad:
        return _Pad(self.dim, self.size, self.padded_size, self.value)

    def describe(self) -> str:
        return f"unpad(dim={self.dim}, {self.padded_size} to {self.size})"


def narrow(src: str, dst: str | None = None, *, dim: int = 0, start: int, length: int) -> StateMapper:
    """Take a range of one dim of a tensor. It has no inverse, because values are lost; `split` with `drop` has one.

    Args:
        src: Name of the tensor.
        dst: Name of the result; `None` keeps the name.
        dim: Dim to cut; negative values count from the end.
        start: First index.
        length: Number of indices.

    Raises:
        ValueError: If `start` or `length` is negative.
    """
    if start < 0 or length < 0:
        raise ValueError(f"narrow of {src} got start {start} and length {length}; expected both to be 0 or more.")
    return leaf(_Narrow(dim, start, length), [src], [src if dst is None else dst])


def select(src: str, dst: str | None = None, *, dim: int = 0, index: int) -> StateMapper:
    """Take one index of one dim of a tensor and remove the dim. It has no inverse, because values are lost.

    Args:
        src: Name of the tensor.
        dst: Name of the result; `None` keeps the name.
        dim: Dim to remove; negative values count from the end.
        index: Index in that dim; negative values count from the end.
    """
    return leaf(_Select(dim, index), [src], [src if dst is None else dst])


def pad(
    src: str, dst: str | None = None, *, dim: int = 0, size: int, padded_size: int, value: float = 0
) -> StateMapper:
    """Pad one dim of a tensor at its end, for example a vocabulary to a divisible size. The inverse cuts the padding.

    Args:
        src: Name of the tensor.
        dst: Name of the result; `None` keeps the name.
        dim: Dim to pad; negative values count from the end.
        size: Current size of the dim.
        padded_size: New size of the dim.
        value: Value of the padding.

    Raises:
        ValueError: If `size` is negative or above `padded_size`.
    """
    if not 0 <= size <= padded_size:
        raise ValueError(
            f"pad of {src} got size {size} and padded_size {padded_size}; expected 0 <= size <= padded_size."
        )
    return leaf(_Pad(dim, size, padded_size, value), [src], [src if dst is None else dst])


def _checked_dim(info: TensorInfo, dim: int, size: int) -> int:
    """Return the dim counted from 0; raise `ValueError` if it does not have the given size."""
    normalized = normalized_dim(dim, len(info.shape))
    if info.shape[normalized] != size:
        raise ValueError(f"dim {dim} of shape {list(info.shape)} must have size {size}.")
    return normalized
