"""Shape and dtype of a tensor whose data may not be loaded."""

from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor; the global shape of a `DTensor`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorInfo":
        """Return shape and dtype of a tensor."""
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def to_meta(self) -> Tensor:
        """Create a meta tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def describe(self) -> str:
        """Return shape and dtype as text: `[2, 3] float32`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
