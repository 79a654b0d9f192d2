"""One tensor into one tensor: another order of dims, another dtype, a function of the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from d9d_state.mapper.compose import parallel
from d9d_state.mapper.graph import StateMapper, leaf


@final
@dataclass(frozen=True, slots=True)
class _Transpose:
    dim0: int
    dim1: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.transpose(self.dim0, self.dim1) for tensor in tensors)

    def inverse(self) -> "_Transpose":
        return self

    def describe(self) -> str:
        return f"transpose({self.dim0}, {self.dim1})"


@final
@dataclass(frozen=True, slots=True)
class _Cast:
    dtype: torch.dtype
    back: torch.dtype | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.dtype) for tensor in tensors)

    def inverse(self) -> "_Cast":
        if self.back is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as cast(..., back=dtype).")
        return _Cast(self.back, self.dtype)

    def describe(self) -> str:
        return f"cast({str(self.dtype).removeprefix('torch.')})"


TensorFunction: TypeAlias = Callable[..., Sequence[Tensor]]


@final
@dataclass(frozen=True, slots=True)
class _Function:
    forward: TensorFunction
    backward: TensorFunction | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.forward(*tensors))

    def inverse(self) -> "_Function":
        if self.backward is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as transform(..., inverse=function).")
        return _Function(self.backward, self.forward)

    def describe(self) -> str:
        return f"transform({self.forward})"


def transpose(src: str, dst: str | None = None, *, dim0: int = 0, dim1: int = 1) -> StateMapper:
    """Swap two dims of a tensor. It is its own inverse, names apart.

    Args:
        src: Name of the tensor.
        dst: Name of the result; `None` keeps the name.
        dim0: One dim.
        dim1: The other.
    """
    return leaf(_Transpose(dim0, dim1), [src], [src if dst is None else dst])


def cast(*names: str, dtype: torch.dtype, back: torch.dtype | None = None) -> StateMapper:
    """Convert tensors to a dtype. Loading converts between floating dtypes by itself; this is for files.

    Args:
        names: Names of the tensors, which stay.
        dtype: The dtype they get.
        back: The dtype that the inverse gives them. The round trip is exact only where `dtype` holds all values.

    Raises:
        ValueError: If a name occurs twice.
    """
    return parallel(*(leaf(_Cast(dtype, back), [name], [name]) for name in names))


def transform(
    srcs: Sequence[str],
    dsts: Sequence[str],
    function: TensorFunction,
    *,
    inverse: TensorFunction | None = None,
) -> StateMapper:
    """A function of your own.

    Args:
        srcs: Names of the tensors it takes, in order.
        dsts: Names of the tensors it gives, in order.
        function: Takes one tensor per name of `srcs` and gives a sequence with one per name of `dsts`. It has to work
            on meta tensors too, for the check of shapes.
        inverse: The way back, bit for bit; without it, the mapper has no inverse.

    Raises:
        ValueError: If `srcs` or `dsts` is empty or names one twice.
    """
    return leaf(_Function(function, inverse), srcs, dsts)
