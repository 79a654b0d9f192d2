"""What is known of a tensor before its bytes are read."""

from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor, which may be sharded over a mesh.

    Attributes:
        shape: The global shape.
        dtype: The dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorInfo":
        """The description of a tensor; of a `DTensor`, that of the whole."""
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """What the whole tensor takes."""
        return prod(self.shape) * self.dtype.itemsize

    def to_meta(self) -> Tensor:
        """A tensor of this shape and dtype that has no storage."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def describe(self) -> str:
        """Shape and dtype as messages show them: `[2, 3] float32`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
