"""Dequantization of block-scaled weights, as an operation of the mapper, and quantization as its inverse."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import infos_of
from d9d_state.mapper.compose import parallel, sequential
from d9d_state.mapper.names import identity
from d9d_state.mapper.operation import infer_on_meta
from d9d_state.mapper.quantized import BlockScaled
from d9d_state.mapper.state_mapper import StateMapper, leaf
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class _Dequantize:
    layout: BlockScaled
    dtype: torch.dtype

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (info,) = self.infer(*infos_of(tensors))
        return (self.compute(Region.whole(info.shape), *tensors).to(self.dtype),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return (TensorInfo(self.layout.shape(*inputs), self.dtype),)

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> Sequence[Region]:
        return self.layout.needs(region, *inputs)

    def compute(self, region: Region, *inputs: Tensor) -> Tensor:
        return self.layout.decode(region, *inputs).to(self.dtype)

    def inverse(self) -> "_Quantize":
        return _Quantize(self.layout, self.dtype)

    def describe(self) -> str:
        return f"dequantize({self.layout})"


@final
@dataclass(frozen=True, slots=True)
class _Quantize:
    layout: BlockScaled
    back: torch.dtype

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (weight,) = tensors
        return self.layout.encode(weight)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def inverse(self) -> _Dequantize:
        return _Dequantize(self.layout, self.back)

    def describe(self) -> str:
        return f"quantize({self.layout})"


def dequantize(weight: str, layout: BlockScaled, *, dtype: torch.dtype = torch.float32) -> StateMapper:
    """Convert the stored tensors of a block-scaled weight, such as values and scales, to the weight. Inverse: quantize.

    The product of value and scale is computed in float32, then converted to `dtype`. A rank reads only the values of
    its shard and their scales. With the default `dtype`, loading rounds once, to the model's dtype. The layout derives
    the names of the stored tensors from the name of the weight. The inverse is exact only for weights that the layout
    can represent. Each layout documents which dequantized weights it restores exactly.
    """
    return leaf(_Dequantize(layout, dtype), layout.names(weight), [weight])


def dequantize_inputs(
    mapper: StateMapper, layout: BlockScaled, stored: Collection[str], *, dtype: torch.dtype = torch.float32
) -> StateMapper:
    """Return the mapper with `dequantize` before each input that a checkpoint stores in block-scaled form.

        folder = ModelFolder.open("DeepSeek-V3")
        mapper = dequantize_inputs(mapper, Fp8Blocks(), folder.tensors)

    `mapper` is the mapper of the checkpoint without quantization. An input counts as block-scaled if `stored`, the
    names of the tensors in the checkpoint, contains all names that the layout derives from the input's name.
    """
    names = frozenset(stored)
    scaled = [name for name in mapper.inputs if names.issuperset(layout.names(name))]
    plain = [name for name in mapper.inputs if name not in frozenset(scaled)]
    return sequential(parallel(*(dequantize(name, layout, dtype=dtype) for name in scaled), identity(*plain)), mapper)
