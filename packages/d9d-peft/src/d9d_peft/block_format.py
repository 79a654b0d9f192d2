"""Block-quantized formats of frozen weights, NF4 with 4 bits per element and int8, and quantization while loading.

Each block of consecutive input features of a row has one scale, the largest magnitude of the block (float32). NF4
("QLoRA", arXiv:2305.14314, section 3 and appendix E) encodes an element as the nearest of 16 quantiles of a normal
distribution, in units of the scale; int8 encodes it as a multiple of scale / 127.

Shape legend: O output features; I input features; N blocks of a row; B elements of a block. Grouped weights have a
leading dim [G, O, I].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_dist.errors import check_choice
from d9d_state import StateMapper, TensorInfo, infer_on_meta, leaf

BlockFormat: TypeAlias = Literal["nf4", "int8"]
"""Format of a block-quantized weight."""

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the codes 0 to 15 of NF4, from appendix E of the paper."""

_INT8_MAX = 127.0
_MOST_ELEMENTS = 1 << 20
"""Maximum number of elements to quantize at once; each needs about 16 bytes of temporary memory."""


def quantize_blocks(weight_OI: Tensor, block_format: BlockFormat, block_size: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight [..., O, I], both as bytes (uint8).

    `block_size` divides I, and is even for NF4. Codes are [..., O, I / 2] for NF4, with the even element in the high
    bits, and [..., O, I] for int8. Scales are the bytes of float32 numbers, [..., O, 4 N]. No collectives. Rows are
    quantized in chunks to bound temporary memory.
    """
    check_choice("block_format", block_format, BlockFormat)
    rows = max(1, _MOST_ELEMENTS * weight_OI.shape[-2] // max(weight_OI.numel(), 1))
    codes, scales = zip(
        *(_quantize_rows(part, block_format, block_size) for part in weight_OI.split(rows, -2)), strict=True
    )
    return torch.cat(codes, -2), torch.cat(scales, -2)


def _quantize_rows(weight_OI: Tensor, block_format: BlockFormat, block_size: int) -> tuple[Tensor, Tensor]:
    blocks_ONB = weight_OI.float().unflatten(-1, (-1, block_size))
    scales_ON = blocks_ONB.abs().amax(dim=-1)
    normal_ONB = blocks_ONB / scales_ON.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    normal_OI = normal_ONB.flatten(-2)
    if block_format == "int8":
        codes = (normal_OI * _INT8_MAX).round().to(torch.int8).view(torch.uint8)
    else:
        values = torch.tensor(NF4_VALUES, device=weight_OI.device)
        numbers = torch.bucketize(normal_OI, (values[1:] + values[:-1]) / 2, out_int32=True)
        pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
        codes = pairs[..., 0] << 4 | pairs[..., 1]
    return codes, scales_ON.contiguous().view(torch.uint8)


def dequantize_blocks(codes: Tensor, scale_bytes: Tensor, block_format: BlockFormat, *, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., O, I] in `dtype`, computed from codes and scales in at least float32. No collectives."""
    scales_ON = scale_bytes.contiguous().view(torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    if block_format == "int8":
        normal_OI = codes.view(torch.int8).to(wide) / _INT8_MAX
    else:
        # One lookup for both elements of a byte needs fewer index bytes than one lookup for each element.
        values = torch.tensor(NF4_VALUES, dtype=wide, device=codes.device)
        pairs = torch.cartesian_prod(values, values)
        normal_OI = pairs[codes.int()].flatten(-2)
    normal_ONB = normal_OI.unflatten(-1, (scales_ON.shape[-1], -1))
    return (normal_ONB * scales_ON.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize(weight_OI: Tensor, *, block_format: BlockFormat, block_size: int) -> Tensor:
    """Return a weight [..., O, I] as a layer under `quantize_base` computes with it: quantized, then dequantized."""
    codes, scales = quantize_blocks(weight_OI, block_format, block_size)
    return dequantize_blocks(codes, scales, block_format, dtype=weight_OI.dtype)


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
