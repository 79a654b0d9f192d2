"""Quantization of weights while they are loaded, and the inverse: operations of the state mapper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_peft.block_format import BlockFormat, dequantize_blocks, quantize_blocks
from d9d_state import StateMapper, TensorInfo, infer_on_meta, leaf


@final
@dataclass(frozen=True, slots=True)
class _QuantizeBlocks:
    """Operation from a weight [..., O, I] to its codes and scales, which a rank computes for its shard only."""

    block_format: BlockFormat
    block_size: int
    dtype: torch.dtype

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (weight,) = tensors
        return quantize_blocks(weight, self.block_format, self.block_size)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> Sequence[Region]:
        (weight,) = inputs
        width = self.infer(weight)[output].shape[-1]
        features = weight.shape[-1]
        first, size = region.offsets[-1] * features // width, region.sizes[-1] * features // width
        assert first % self.block_size == size % self.block_size == 0, "shards consist of whole blocks"
        return (Region((*region.offsets[:-1], first), (*region.sizes[:-1], size)),)

    def inverse(self) -> "_DequantizeBlocks":
        return _DequantizeBlocks(self)

    def describe(self) -> str:
        return f"quantize({self.block_format}, block_size={self.block_size})"


@final
@dataclass(frozen=True, slots=True)
class _DequantizeBlocks:
    """Operation from codes and scales to the weight [..., O, I] that the model computes with.

    Quantizing the result again yields the same codes and scales, unless rounding to its dtype changes the values.
    """

    quantize: _QuantizeBlocks

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        codes, scales = tensors
        return (dequantize_blocks(codes, scales, self.quantize.block_format, dtype=self.quantize.dtype),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def inverse(self) -> _QuantizeBlocks:
        return self.quantize

    def describe(self) -> str:
        return f"de{self.quantize.describe()}"


def quantize_weight(
    weight: str, scales: str, block_format: BlockFormat, block_size: int, dtype: torch.dtype
) -> StateMapper:
    """Return the mapper from a weight to its codes, under the name of the weight, and its scales.

    The inverse dequantizes to `dtype`.
    """
    return leaf(_QuantizeBlocks(block_format, block_size, dtype), [weight], [weight, scales])
