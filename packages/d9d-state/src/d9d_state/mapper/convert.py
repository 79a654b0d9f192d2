"""Operations on a tensor's dims, dtype or values: transpose, permute, cast, and user functions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import ClassVar, Self, TypeAlias, final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import Shape, infos_of, normalized_dim, same_shapes
from d9d_state.mapper.compose import parallel
from d9d_state.mapper.operation import OneInput, Piece, infer_on_meta
from d9d_state.mapper.state_mapper import StateMapper, leaf
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Transpose(OneInput):
    dim0: int
    dim1: int

    def shapes(self, shape: Shape) -> tuple[Shape]:
        sizes = list(shape)
        dim0, dim1 = normalized_dim(self.dim0, len(shape)), normalized_dim(self.dim1, len(shape))
        sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
        return (tuple(sizes),)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        return (tensor.transpose(self.dim0, self.dim1),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        (dims,) = self.shapes(tuple(range(len(shape))))
        return region.permuted(dims), target.transpose(self.dim0, self.dim1)

    def inverse(self) -> "_Transpose":
        return self

    def describe(self) -> str:
        return f"transpose({self.dim0}, {self.dim1})"


@final
@dataclass(frozen=True, slots=True)
class _Permute(OneInput):
    dims: tuple[int, ...]

    def shapes(self, shape: Shape) -> tuple[Shape]:
        if len(shape) != len(self.dims):
            raise ValueError(f"got shape {list(shape)}; expected {len(self.dims)} dims.")
        return (tuple(shape[dim] for dim in self.dims),)

    def move(self, tensor: Tensor) -> tuple[Tensor]:
        return (tensor.permute(self.dims),)

    def source(self, output: int, region: Region, target: Tensor, shape: Shape) -> tuple[Region, Tensor]:
        back = self.inverse().dims
        return region.permuted(back), target.permute(back)

    def inverse(self) -> "_Permute":
        return _Permute(tuple(self.dims.index(dim) for dim in range(len(self.dims))))

    def describe(self) -> str:
        return f"permute({', '.join(map(str, self.dims))})"


@final
@dataclass(frozen=True, slots=True)
class _Cast:
    dtype: torch.dtype
    back: torch.dtype | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.dtype) for tensor in tensors)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo(info.shape, self.dtype) for info in inputs)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> tuple[Piece]:
        return (Piece(output, region, target),)

    def inverse(self) -> "_Cast":
        if self.back is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as cast(..., back=dtype).")
        return _Cast(self.back, self.dtype)

    def describe(self) -> str:
        return f"cast({str(self.dtype).removeprefix('torch.')})"


TensorFunction: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class _AnyFunction(ABC):
    """Operation that calls a user function. Subclasses add `__call__`."""

    suffix: ClassVar[str]  # end of the description
    forward: TensorFunction
    backward: TensorFunction | None

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def inverse(self) -> Self:
        if self.backward is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as transform(..., inverse=function).")
        return type(self)(self.backward, self.forward)

    def describe(self) -> str:
        name = self.forward.__qualname__ if isinstance(self.forward, FunctionType) else repr(self.forward)
        return f"transform({name}{self.suffix})"


@final
class _Function(_AnyFunction):
    __slots__ = ()
    suffix = ""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _results(self.forward(*tensors))


@final
class _ElementwiseFunction(_AnyFunction):
    __slots__ = ()
    suffix = ", elementwise"

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = _results(self.forward(*tensors))
        shape = same_shapes(infos_of(tensors))
        other = next((tensor.shape for tensor in outputs if tensor.shape != shape), None)
        if other is not None:
            raise ValueError(
                f"it returned shape {list(other)} for inputs of shape {list(shape)}; "
                "an elementwise function must keep the shape."
            )
        return outputs

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> tuple[Region, ...]:
        return (region,) * len(inputs)


def _results(returned: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of a user function; a tensor is one result, not a sequence of its rows."""
    results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    tensors = tuple(each for each in results if isinstance(each, Tensor))
    if len(tensors) < len(results):
        wrong = next(type(each).__name__ for each in results if not isinstance(each, Tensor))
        raise ValueError(f"it returned a value of type {wrong}; expected tensors, one for each name in dsts.")
    return tensors


def transpose(src: str, dst: str | None = None, *, dim0: int = 0, dim1: int = 1) -> StateMapper:
    """Swap two dims of a tensor, negative from the end; `dst=None` keeps the name. The inverse swaps them back."""
    return leaf(_Transpose(dim0, dim1), [src], [src if dst is None else dst])


def permute(src: str, dst: str | None = None, *, dims: Sequence[int]) -> StateMapper:
    """Permute the dims of a tensor, as `Tensor.permute` does; `dst=None` keeps the name.

    Raises:
        ValueError: If `dims` is not a permutation of all dims.
    """
    order = tuple(dim + len(dims) if dim < 0 else dim for dim in dims)
    if sorted(order) != list(range(len(dims))):
        raise ValueError(f"permute of {src} got dims {list(dims)}; expected each of {len(dims)} dims once.")
    return leaf(_Permute(order), [src], [src if dst is None else dst])


def cast(*names: str, dtype: torch.dtype, back: torch.dtype | None = None) -> StateMapper:
    """Convert tensors to a dtype; names do not change. The inverse is a `cast` to `back`; it requires `back`.

    Loading into a model converts between floating-point dtypes without `cast`; use it to choose the dtype in files. The
    round trip is exact only if `dtype` can represent all values.

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
    elementwise: bool = False,
) -> StateMapper:
    """Apply a user function to tensors. The inverse applies `inverse`.

    Args:
        srcs: Names of the function's arguments, in order.
        dsts: Names of the function's results, in order.
        function: Takes one tensor per name in `srcs`, without changing it, and returns one tensor per name in `dsts`,
            in a sequence or, for one name, alone. For shape inference, the function must also work on meta tensors.
        inverse: Function that restores the inputs bit for bit; without it, the mapper has no inverse.
        elementwise: True if all tensors have the same shape and each output element depends only on the input elements
            at the same index. A rank then reads and computes only its shard.

    Raises:
        ValueError: If `srcs` or `dsts` is empty or contains a name twice.
    """
    operation = _ElementwiseFunction(function, inverse) if elementwise else _Function(function, inverse)
    return leaf(operation, srcs, dsts)
