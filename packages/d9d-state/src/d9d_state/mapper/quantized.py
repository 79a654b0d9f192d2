"""Layouts of block-scaled weights: low-precision values with one scale per block, as in released checkpoints.

Each layout converts its stored tensors to a float32 weight and back. A weight is at least 2-dimensional: [..., O, I],
with O output features and I input features.
"""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import Region
from d9d_state.tensor_info import TensorInfo

_E4M3_MAX = 448.0
_PER_WORD = 8  # 4-bit numbers in an int32
_MX_GROUP = 32  # values per scale in the MX formats
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of neighboring values
_E2M1_MAX_EXPONENT = 2
_E8M0_BIAS = 127


class BlockScaled(Protocol):
    """Layout of a block-scaled weight in a checkpoint."""

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the stored tensors of a weight, in the order of the other methods."""
        ...

    def shape(self, *stored: TensorInfo) -> tuple[int, ...]:
        """Return the shape of the weight; raise `ValueError` if the stored tensors do not match."""
        ...

    def needs(self, region: Region, *stored: TensorInfo) -> tuple[Region, ...]:
        """Return the region of each stored tensor that a region of the weight depends on."""
        ...

    def decode(self, region: Region, *stored: Tensor) -> Tensor:
        """Compute a region of the weight in float32 from the stored regions that `needs` returns."""
        ...

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Quantize a full weight to the stored tensors; on meta, return their shapes and dtypes."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 (e4m3) values and one scale per block: "DeepSeek-V3" (arXiv:2412.19437), section 3.3.2.

    Stored: `x.weight` [..., O, I] float8_e4m3fn, and its scales `x.weight_scale_inv` [..., ceil(O / block[0]),
    ceil(I / block[1])]. A weight is the product of value and scale, computed in float32. `encode` divides each block by
    its largest magnitude / 448.

    Encoding a weight that was decoded to float32 restores the values of each block that contains 448 or -448. The
    block's scale is restored to one unit in the last place, a power of two exactly. With `power_of_two`, blocks with a
    power-of-two scale and a magnitude above 224 are restored.

    Attributes:
        block: Rows and columns of a block.
        scale_dtype: Dtype of encoded scales.
        power_of_two: If True, `encode` rounds scales up to powers of two (the scale format "ue8m0").
    """

    block: tuple[int, int] = (128, 128)
    scale_dtype: torch.dtype = torch.float32
    power_of_two: bool = False

    def names(self, weight: str) -> tuple[str, str]:
        """See `BlockScaled`."""
        return weight, f"{weight}_scale_inv"

    def shape(self, *stored: TensorInfo) -> tuple[int, ...]:
        """See `BlockScaled`."""
        values, scales = stored
        expected = (*values.shape[:-2], *(_num_blocks(values.shape[dim], self.block[dim]) for dim in (-2, -1)))
        if values.dtype != torch.float8_e4m3fn or scales.shape != expected or not scales.dtype.is_floating_point:
            raise ValueError(
                f"got {values.describe()} with the scales {scales.describe()}; expected float8_e4m3fn values, and "
                f"floating-point scales of shape {list(expected)}, one per block of {self.block[0]} x {self.block[1]}."
            )
        return values.shape

    def needs(self, region: Region, *stored: TensorInfo) -> tuple[Region, Region]:
        """See `BlockScaled`."""
        scales = region
        for dim in (-2, -1):
            first, count = _covering(region, dim, self.block[dim])
            scales = scales.replaced(dim % len(region.sizes), first, count)
        return region, scales

    def decode(self, region: Region, *stored: Tensor) -> Tensor:
        """See `BlockScaled`."""
        values, scales = stored
        scales = scales.float()
        for dim in (-2, -1):
            offset, size, block = region.offsets[dim], region.sizes[dim], self.block[dim]
            positions = torch.arange(offset, offset + size, device=values.device) // block - offset // block
            scales = scales.index_select(dim, positions)
        return values.float() * scales

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockScaled`."""
        *_, num_rows, num_columns = weight.shape
        rows, columns = self.block
        padding = (0, -num_columns % columns, 0, -num_rows % rows)
        blocks = F.pad(weight.float(), padding).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
        scales = torch.where(largest > 0, largest / _E4M3_MAX, 1.0)
        if self.power_of_two:
            mantissa, exponent = torch.frexp(scales)
            scales = torch.ldexp(torch.ones_like(scales), torch.where(mantissa > 0.5, exponent, exponent - 1))
        values = (blocks / scales).clamp(-_E4M3_MAX, _E4M3_MAX).flatten(-4, -3).flatten(-2, -1)
        values = values[..., :num_rows, :num_columns].to(torch.float8_e4m3fn)
        return values.contiguous(), scales.squeeze(-1).squeeze(-2).to(self.scale_dtype)


@final
@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4: e2m1 values in groups of 32 with an e8m0 scale, "OCP Microscaling Formats" 1.0, as in GPT-OSS.

    Stored: `x_blocks` [..., O, I / 32, 16] uint8, two values per byte with the first in the low bits, and `x_scales`
    [..., O, I / 32] uint8, exponents plus 127. The weight `x` is transposed, [..., I, O], as in `transformers`.
    `encode` follows OCP section 6.3. Encoding and decoding a decoded weight restores it bit for bit, although the
    exponent of a group may differ.
    """

    def names(self, weight: str) -> tuple[str, str]:
        """See `BlockScaled`."""
        return f"{weight}_blocks", f"{weight}_scales"

    def shape(self, *stored: TensorInfo) -> tuple[int, ...]:
        """See `BlockScaled`."""
        blocks, scales = stored
        if blocks.shape != (*scales.shape, _MX_GROUP // 2) or not blocks.dtype == scales.dtype == torch.uint8:
            raise ValueError(
                f"got {blocks.describe()} with the scales {scales.describe()}; expected uint8 blocks of 16 bytes, and "
                "one uint8 scale per block."
            )
        *outer, num_rows, num_groups = scales.shape
        return *outer, num_groups * _MX_GROUP, num_rows

    def needs(self, region: Region, *stored: TensorInfo) -> tuple[Region, Region]:
        """See `BlockScaled`."""
        dim = len(region.sizes) - 1
        region = region.permuted([*range(dim - 1), dim, dim - 1])
        scales = region.replaced(dim, *_covering(region, -1, _MX_GROUP))
        return scales.inserted(dim + 1, 0, _MX_GROUP // 2), scales

    def decode(self, region: Region, *stored: Tensor) -> Tensor:
        """See `BlockScaled`."""
        blocks, scales = stored
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
        values = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
        values = torch.ldexp(values, (scales.int() - _E8M0_BIAS).unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, region.offsets[-2] % _MX_GROUP, region.sizes[-2]).mT

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockScaled`."""
        groups = _groups(weight.mT, _MX_GROUP)
        exponent = torch.frexp(groups.abs().amax(dim=-1, keepdim=True)).exponent - 1 - _E2M1_MAX_EXPONENT
        exponent = exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS)
        scaled = torch.ldexp(groups, -exponent)
        # Round to nearest. The two indices differ at a midpoint, which goes to the even mantissa.
        bounds = torch.tensor(_E2M1_BOUNDS, device=weight.device)
        low, high = (torch.bucketize(scaled.abs().contiguous(), bounds, right=right) for right in (False, True))
        codes = torch.where(low % 2 == 0, low, high).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
        pairs = codes.unflatten(-1, (-1, 2))
        return pairs[..., 0] | (pairs[..., 1] << 4), (exponent.squeeze(-1) + _E8M0_BIAS).to(torch.uint8)


@final
@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Symmetric 4-bit integers with a scale per group of a row: "pack-quantized" of the library `compressed-tensors`.

    Stored: `x.weight_packed` [..., O, I / 8] int32, `x.weight_scale` [..., O, I / group_size], and `x.weight_shape`
    [2], the sizes O and I. A word holds eight numbers, each plus 8, with the first in the lowest bits. `encode` chooses
    for each group the scale with the smallest squared error among (largest magnitude) / 7, / 7.5 and / 8. Encoding a
    weight that was decoded to float32 restores the stored numbers of groups that contain 7, -7 or -8.

    Attributes:
        group_size: Numbers per scale; a multiple of 8.
        scale_dtype: Dtype of encoded scales.
    """

    group_size: int = 32
    scale_dtype: torch.dtype = torch.bfloat16

    def names(self, weight: str) -> tuple[str, str, str]:
        """See `BlockScaled`."""
        return f"{weight}_packed", f"{weight}_scale", f"{weight}_shape"

    def shape(self, *stored: TensorInfo) -> tuple[int, ...]:
        """See `BlockScaled`."""
        packed, scales, shape = stored
        size = packed.shape[-1] * _PER_WORD
        expected = (*packed.shape[:-1], size // self.group_size)
        fits = size % self.group_size == 0 and scales.shape == expected and scales.dtype.is_floating_point
        if not fits or packed.dtype != torch.int32 or shape.shape != (2,):
            raise ValueError(
                f"got {packed.describe()} with the scales {scales.describe()} and the shape {shape.describe()}; "
                f"expected packed int32 weights, floating-point scales of shape {list(expected)} (one per "
                f"{self.group_size} numbers), and a shape tensor of shape [2]."
            )
        return *packed.shape[:-1], size

    def needs(self, region: Region, *stored: TensorInfo) -> tuple[Region, Region, Region]:
        """See `BlockScaled`."""
        dim = len(region.sizes) - 1
        scales = region.replaced(dim, *_covering(region, -1, self.group_size))
        words = self.group_size // _PER_WORD
        packed = scales.replaced(dim, scales.offsets[dim] * words, scales.sizes[dim] * words)
        return packed, scales, Region.whole(stored[2].shape)

    def decode(self, region: Region, *stored: Tensor) -> Tensor:
        """See `BlockScaled`."""
        packed, scales, _ = stored
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
        numbers = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8
        weight = (numbers.unflatten(-1, (-1, self.group_size)) * scales.float().unsqueeze(-1)).flatten(-2)
        return weight.narrow(-1, region.offsets[-1] % self.group_size, region.sizes[-1])

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockScaled`."""
        groups = _groups(weight, self.group_size)
        largest = groups.abs().amax(dim=-1, keepdim=True)
        scales = torch.stack([torch.where(largest > 0, largest / levels, 1.0) for levels in (7.0, 7.5, 8.0)])
        scales = scales.to(self.scale_dtype).float()
        numbers = (groups / scales).round().clamp(-8, 7)
        best = (numbers * scales - groups).square().sum(dim=-1, keepdim=True).argmin(dim=0, keepdim=True)
        scale = scales.gather(0, best)[0].squeeze(-1)
        chosen = numbers.gather(0, best.expand(1, *groups.shape))[0].int().flatten(-2).unflatten(-1, (-1, _PER_WORD))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
        packed = ((chosen + 8) << shifts).sum(dim=-1, dtype=torch.int32)
        shape = torch.tensor(weight.shape[-2:], dtype=torch.int64, device=weight.device)
        return packed, scale.to(self.scale_dtype), shape


def _num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def _covering(region: Region, dim: int, block: int) -> tuple[int, int]:
    """Return the first block that a region needs along a dim, and the number of blocks."""
    first = region.offsets[dim] // block
    return first, _num_blocks(region.offsets[dim] + region.sizes[dim], block) - first


def _groups(weight: Tensor, size: int) -> Tensor:
    """Return a weight in float32, with the last dim split into groups."""
    if weight.shape[-1] % size:
        raise ValueError(f"got shape {list(weight.shape)}; expected a last dim that is a multiple of {size}.")
    return weight.float().unflatten(-1, (-1, size))
