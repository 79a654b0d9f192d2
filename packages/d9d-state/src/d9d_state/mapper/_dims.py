"""Dim and dtype checks that several operations share."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from d9d_state.tensor_info import TensorInfo

Shape: TypeAlias = tuple[int, ...]


def normalized_dim(dim: int, num_dims: int) -> int:
    """Convert a possibly negative dim to one counted from 0; raise `ValueError` if it is out of range."""
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"got dim {dim}; expected a dim of a tensor with {num_dims} dims.")
    return dim % num_dims


def sized_dim(shape: Shape, dim: int, size: int) -> int:
    """Return the dim counted from 0; raise `ValueError` if it does not have the given size."""
    normalized = normalized_dim(dim, len(shape))
    if shape[normalized] != size:
        raise ValueError(f"dim {dim} of shape {list(shape)} must have size {size}.")
    return normalized


def resized(shape: Shape, dim: int, *sizes: int) -> Shape:
    """Replace the size of one dim, counted from 0, by other sizes; without sizes, remove the dim."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def common_dtype(inputs: Sequence[TensorInfo]) -> torch.dtype:
    """Return the dtype to which `torch.promote_types` promotes all inputs; raise `ValueError` if there is none."""
    common = inputs[0].dtype
    for info in inputs[1:]:
        if info.dtype != common:
            try:
                common = torch.promote_types(common, info.dtype)
            except RuntimeError as error:
                got = " and ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in inputs))
                raise ValueError(
                    f"got {got}, which torch cannot promote to a common dtype; cast() the inputs first."
                ) from error
    return common


def same_shapes(inputs: Sequence[TensorInfo]) -> tuple[int, ...]:
    """Return the shape that all inputs have; raise `ValueError` if the shapes differ."""
    shape = inputs[0].shape
    if any(info.shape != shape for info in inputs):
        shapes = dict.fromkeys(str(list(info.shape)) for info in inputs)
        raise ValueError(f"got shapes {' and '.join(shapes)}; expected the same shape.")
    return shape


def is_lossless(one: torch.dtype, other: torch.dtype) -> bool:
    """Return True if `other` can represent every value of `one`; both are floating-point dtypes."""
    narrow, wide = torch.finfo(one), torch.finfo(other)
    return (
        narrow.max <= wide.max
        and wide.eps <= narrow.eps
        # smallest_normal * eps is the smallest subnormal number.
        and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
    )


def infos_of(tensors: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
    """Return shape and dtype of each tensor."""
    return tuple(TensorInfo.of(tensor) for tensor in tensors)
