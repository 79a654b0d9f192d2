"""Rules of dims and dtypes that several operations share, with one wording of what is wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from d9d_state.tensor_info import TensorInfo


def normalized_dim(dim: int, num_dims: int) -> int:
    """The dim, counted from 0.

    Raises:
        ValueError: If a tensor with so many dims has none of this number.
    """
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"got dim {dim}; expected one of the {num_dims} dims, counted from 0 or backwards from -1.")
    return dim % num_dims


def resized(info: TensorInfo, dim: int, size: int) -> TensorInfo:
    """The tensor with another size in one dim, counted from 0."""
    return TensorInfo((*info.shape[:dim], size, *info.shape[dim + 1 :]), info.dtype)


def common_dtype(inputs: Sequence[TensorInfo]) -> torch.dtype:
    """The dtype of a tensor that holds values of all inputs.

    Raises:
        ValueError: If there is none.
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
    """The shape that all inputs have.

    Raises:
        ValueError: If they have different ones.
    """
    shape = inputs[0].shape
    if any(info.shape != shape for info in inputs):
        shapes = dict.fromkeys(str(list(info.shape)) for info in inputs)
        raise ValueError(f"got shapes {' and '.join(shapes)}; expected the same shape.")
    return shape


def is_lossless(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating dtype holds every value of another floating dtype."""
    narrow, wide = torch.finfo(one), torch.finfo(other)
    return (
        narrow.max <= wide.max
        and wide.eps <= narrow.eps
        # The smallest value below the normal ones, where a dtype still counts in steps of eps.
        and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
    )


def infos_of(tensors: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
    """Shapes and dtypes of tensors."""
    return tuple(TensorInfo.of(tensor) for tensor in tensors)


def _kinds(inputs: Sequence[TensorInfo]) -> str:
    return " and ".join(dict.fromkeys(str(info.dtype).removeprefix("torch.") for info in inputs))
