"""Time of one kernel: a roofline whose compute roof depends on the shape.

    t(matmul) = max(2 m n k / (P e w d), bytes / (B f)) + t0
    w = tiles / (M ceil(tiles / M)),  tiles = ceil(m / 128) ceil(n / 128)
    d = k / (k + k_half), times 0.3 if m, n or k is odd: tensor cores need rows aligned to 16 bytes
    t(pointwise) = bytes / (B f) + t0

P: peak rate, FLOP/s. B: memory bandwidth, bytes/s. e, f: fitted fractions. M: multiprocessors; w is the share of them
that works in the mean wave of 128 x 128 tiles (NVIDIA, "Matrix Multiplication Background User's Guide", section 3). d:
start and end of a tile's inner loop, with k_half = 96. t0: gap between kernels, in s. Times are in s.
Roofline: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785.
"""

from math import ceil

from d9d_loop.planning.hardware_spec import Hardware

TILE = 128
HALF_DEPTH = 96
UNALIGNED = 0.3
"""Speed of a product with an odd size over that of an aligned one: 80 of 250 TFLOP/s on an A100."""


def matmul_seconds(
    hardware: Hardware, m: float, n: float, k: float, *, batch: float = 1, dtype: str = "bf16", num_bytes: float = 2
) -> float:
    """Return the time of `batch` products of m x k and k x n matrices with `num_bytes` per element."""
    device, fitted = hardware.device, hardware.fitted
    tiles = batch * ceil(m / TILE) * ceil(n / TILE)
    waves = ceil(tiles / device.num_multiprocessors)
    share = tiles / (waves * device.num_multiprocessors)
    depth = k / (k + HALF_DEPTH) * (UNALIGNED if n % 2 or k % 2 else 1.0)
    rate = peak_of(hardware, dtype) * fitted.matmul_efficiency * share * depth
    moved = batch * num_bytes * (m * k + k * n + m * n)
    roof = device.memory_bandwidth * fitted.memory_efficiency
    return max(2 * batch * m * n * k / rate, moved / roof) + device.kernel_seconds


def pointwise_seconds(hardware: Hardware, num_bytes: float, *, num_kernels: float = 1) -> float:
    """Return the time of kernels that read and write `num_bytes` in all."""
    roof = hardware.device.memory_bandwidth * hardware.fitted.memory_efficiency
    return num_bytes / roof + num_kernels * hardware.device.kernel_seconds


def attention_seconds(
    hardware: Hardware, flops: float, *, keys: float, head_dim: float, num_tiles: float, backward: bool = False
) -> float:
    """Return the time of a fused attention kernel.

    It reaches `attention_efficiency` of the peak on long sequences of heads of 128 elements, 0.8 of that in the
    backward pass, and less on heads or sequences that are shorter than a few tiles (Dao 2023, https://arxiv.org/abs/2307.08691,
    figures 4 to 6). `num_tiles` is the number of query tiles of all heads, which fill the multiprocessors in waves.
    """
    device = hardware.device
    waves = ceil(num_tiles / device.num_multiprocessors)
    share = num_tiles / (waves * device.num_multiprocessors)
    fill = keys / (keys + 256) * head_dim / (head_dim + 32) * 1.25
    rate = (
        peak_of(hardware, "bf16")
        * hardware.fitted.attention_efficiency
        * min(1.0, fill)
        * share
        * (0.8 if backward else 1.0)
    )
    return flops / rate + device.kernel_seconds


def peak_of(hardware: Hardware, dtype: str) -> float:
    """Return the peak rate of matrix products in a dtype, in FLOP/s; bf16's if the data sheet has no other."""
    peaks = hardware.device.peak_flops
    return peaks.get(dtype, peaks["bf16"])
