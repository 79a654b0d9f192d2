"""Dim and dtype checks that several operations share, with uniform error messages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from d9d_state.tensor_info import TensorInfo


def normalized_dim(dim: int, num_dims: int) -> int:
    """Convert a possibly negative dim to one counted from 0.

    Raises:
        ValueError: If the dim is out of range.
    """
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"got dim {dim}; expected a dim of a tensor with {num_dims} dims.")
    return dim % num_dims


def resized(info: TensorInfo, dim: int, size: int) -> TensorInfo:
    """Replace the size of one dim, counted from 0."""
    return TensorInfo((*info.shape[:dim], size, *info.shape[dim + 1 :]), info.dtype)


def common_dtype(inputs: Sequence[TensorInfo]) -> torch.dtype:
    """Return the dtype to which `torch.promote_types` promotes all inputs.

    Raises:
        ValueError: If torch cannot promote the dtypes, such as different float8 types.
    """
    common = inputs[0].dtype
    for info in inputs[1:]:
        if info.dtype != common:
            try:
                common = torch.promote_types(common, info.dtype)
            except RuntimeError as error:
                raise ValueError(f"got {_kinds(inputs)}; expected one dtype. cast() them first.") from error
    return common


def same_shapes(inputs: Sequence[TensorInfo]) -> tuple[int, ...]:
    """Return the shape that all inputs have.

    Raises:
        ValueError: If the shapes differ.
    """
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


def _kinds(inputs: Sequence[TensorInfo]) -> str:
    return " and ".join(dict.fromkeys(str(info.dtype).removeprefix("torch.") for info in inputs))
