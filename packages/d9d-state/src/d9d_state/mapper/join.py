"""Several tensors as one, and back: along a new dim (stack) or along one they have (concat)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_state.mapper.graph import StateMapper, leaf


@final
@dataclass(frozen=True, slots=True)
class _Stack:
    dim: int
    count: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack(tensors, dim=self.dim),)

    def inverse(self) -> "_Unstack":
        return _Unstack(self.dim, self.count)

    def describe(self) -> str:
        return f"stack(dim={self.dim})"


@final
@dataclass(frozen=True, slots=True)
class _Unstack:
    dim: int
    count: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        if tensor.shape[self.dim] != self.count:
            raise ValueError(f"dim {self.dim} of shape {list(tensor.shape)} must have size {self.count}.")
        return tuple(torch.unbind(tensor, dim=self.dim))

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
        got = tuple(tensor.shape[self.dim] for tensor in tensors)
        if self.sizes is not None and got != self.sizes:
            raise ValueError(f"got sizes {list(got)} in dim {self.dim}; expected {list(self.sizes)}.")
        return (torch.cat(tensors, dim=self.dim),)

    def inverse(self) -> "_Split":
        if self.sizes is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as concat(..., sizes=[...]).")
        return _Split(self.dim, self.sizes)

    def describe(self) -> str:
        return f"concat(dim={self.dim})" if self.sizes is None else f"concat(dim={self.dim}, sizes={list(self.sizes)})"


@final
@dataclass(frozen=True, slots=True)
class _Split:
    dim: int
    sizes: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        if tensor.shape[self.dim] != sum(self.sizes):
            raise ValueError(
                f"dim {self.dim} of shape {list(tensor.shape)} must have size {sum(self.sizes)}, "
                f"the sum of {list(self.sizes)}."
            )
        return tuple(torch.split(tensor, list(self.sizes), dim=self.dim))

    def inverse(self) -> "_Concat":
        return _Concat(self.dim, self.sizes)

    def describe(self) -> str:
        return f"split(dim={self.dim}, sizes={list(self.sizes)})"


def stack(srcs: Sequence[str], dst: str, *, dim: int = 0) -> StateMapper:
    """Stack tensors of one shape along a new dim. The inverse is `unstack`.

    Args:
        srcs: Names of the parts, in order.
        dst: Name of the stack.
        dim: Where the new dim of size `len(srcs)` is inserted.

    Raises:
        ValueError: If `srcs` is empty or names one twice.
    """
    return leaf(_Stack(dim, len(srcs)), srcs, [dst])


def unstack(src: str, dsts: Sequence[str], *, dim: int = 0) -> StateMapper:
    """Take a tensor apart along a dim of size `len(dsts)`, which disappears. The inverse is `stack`.

    Raises:
        ValueError: If `dsts` is empty or names one twice.
    """
    return leaf(_Unstack(dim, len(dsts)), [src], dsts)


def concat(srcs: Sequence[str], dst: str, *, dim: int = 0, sizes: Sequence[int] | None = None) -> StateMapper:
    """Concatenate tensors along a dim. The inverse is `split`.

    Args:
        srcs: Names of the parts, in order.
        dst: Name of the whole.
        dim: The dim along which they are joined.
        sizes: Sizes of the parts in `dim`. Only the inverse needs them; where they are given, they are checked.

    Raises:
        ValueError: If `srcs` is empty or names one twice, or `sizes` has another length.
    """
    if sizes is not None and len(sizes) != len(srcs):
        raise ValueError(f"concat into {dst} got {len(sizes)} sizes for {len(srcs)} tensors; expected one size each.")
    return leaf(_Concat(dim, None if sizes is None else tuple(sizes)), srcs, [dst])


def split(src: str, dsts: Sequence[str], sizes: Sequence[int], *, dim: int = 0) -> StateMapper:
    """Cut a tensor along a dim into parts of given sizes. The inverse is `concat`.

    Raises:
        ValueError: If `dsts` is empty or names one twice, or `sizes` has another length.
    """
    if len(sizes) != len(dsts):
        raise ValueError(f"split of {src} got {len(sizes)} sizes for {len(dsts)} tensors; expected one size each.")
    return leaf(_Split(dim, tuple(sizes)), [src], dsts)
