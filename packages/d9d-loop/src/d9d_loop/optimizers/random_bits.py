"""Random bits by position: those of element i are a function of (key, i), so any part of a tensor can have its own.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), whose state is a counter, as
operations on 64-bit integers that give the same bits on every device. The kernels repeat it.
"""

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB
"""2^64 / golden ratio, as a signed 64-bit integer."""
MIX_1 = -0x40A7B892E31B1A47
"""0xBF58476D1CE4E5B9."""
MIX_2 = -0x6B2FB644ECCEEE15
"""0x94D049BB133111EB."""


def bits_at(indices: Tensor, key: int) -> Tensor:
    """64 random bits for each index, int64.

    Args:
        indices: int64.
        key: Tells streams apart; fits 64 bits with a sign.
    """
    bits = (indices * GOLDEN).add_(key)
    bits = (bits ^ _shift_right(bits, 30)).mul_(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)).mul_(MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """A logical shift: torch's own copies the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def draw(bits: Tensor, number: int) -> Tensor:
    """The first, second, third or fourth 16 of 64 bits, int32.

    Args:
        bits: From `bits_at`.
        number: From 0.

    Returns:
        Values from 0 to 65535.
    """
    return (bits >> (16 * number)).bitwise_and_(0xFFFF).to(torch.int32)
