"""Counter-based random numbers: element i of a stream is a function of (key, i), so a rank can compute any slice.

A torch generator returns numbers in call order, so values would depend on the layout. Here each global index is hashed
with the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). The hash
uses integer tensor operations, which are bitwise equal on every device.
"""

import torch

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def random_bits_at(index: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Return 64 random bits, as int64, for each int64 index. A tensor `key` is int64 and broadcasts with `index`."""
    return mix_bits(index * _GOLDEN + key)


def uniform_at(index: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Return a float64 number, uniform in the open interval (0, 1), for each int64 index."""
    return _unit(random_bits_at(index, key))


def normal_at(index: torch.Tensor, key: int) -> torch.Tensor:
    """Return a standard normal float64 number for each int64 index, by the Box-Muller transform."""
    radius = uniform_at(index * 2, key).log_().mul_(-2.0).sqrt_()
    angle = uniform_at(index * 2 + 1, key).mul_(2.0 * torch.pi)
    return angle.cos_().mul_(radius)


def mix_bits(bits: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of SplitMix64, a bijection of the 64-bit integers, to each int64 element."""
    bits = (bits ^ _shift_right(bits, 30)).mul_(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right logically; torch's `>>` on int64 copies the sign bit."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def _unit(bits: torch.Tensor) -> torch.Tensor:
    """Map the top 53 bits to the midpoint of one of 2^53 equal cells of (0, 1)."""
    return _shift_right(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)
