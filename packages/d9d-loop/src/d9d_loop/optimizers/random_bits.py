"""Counter-based random bits: the bits of element i are a function of (key, i), so each shard can compute its own.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), whose state is
a counter. Its 64-bit integer operations give the same bits on every device. The Triton kernels implement it too.
"""

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB
"""0x9E3779B97F4A7C15, which is 2^64 / golden ratio, as a signed 64-bit integer."""
MIX_1 = -0x40A7B892E31B1A47
"""0xBF58476D1CE4E5B9 as a signed 64-bit integer."""
MIX_2 = -0x6B2FB644ECCEEE15
"""0x94D049BB133111EB as a signed 64-bit integer."""


def bits_at(indices: Tensor, key: int) -> Tensor:
    """Return 64 random bits per index, as int64 of the shape of `indices`.

    Args:
        indices: int64 tensor.
        key: Key of the random stream, a signed 64-bit integer.
    """
    bits = (indices * GOLDEN).add_(key)
    bits = (bits ^ _shift_right(bits, 30)).mul_(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)).mul_(MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift right logically; `>>` of torch is an arithmetic shift."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def draw(bits: Tensor, number: int) -> Tensor:
    """Extract one of the four groups of 16 bits.

    Args:
        bits: Result of `bits_at`, int64.
        number: Index of the group, 0 to 3, from the least significant bits.

    Returns:
        int32 values from 0 to 65535.
    """
    return (bits >> (16 * number)).bitwise_and_(0xFFFF).to(torch.int32)
