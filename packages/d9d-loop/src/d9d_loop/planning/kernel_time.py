"""Time of one kernel: a roofline whose compute roof depends on the shape.

    t(matmul) = max(min over tiles a x b of 2 a b (k / P + k_half / P') waves M / (e r), bytes / (B f)) + t0
    waves = ceil(batch ceil(m / a) ceil(n / b) / M),  r = i / (i + 20) / r(256 x 128),  i = a b / (a + b)
    t(pointwise) = bytes / (B f) + t0

The matrices are m x k and k x n. P: peak rate, FLOP/s, and P' that of bf16, both times 0.3 if the rows of an operand
have an odd size: tensor cores need rows aligned to 16 bytes. B: memory bandwidth, bytes/s. e, f: fitted fractions.
M: multiprocessors, each of which computes a tile in each wave.
r: speed of a tile relative to the largest. Small tiles fill the last wave better, but reuse loaded elements less. The
library is assumed to choose the fastest tile (NVIDIA, "Matrix Multiplication Background User's Guide", sections 3 and
4). k_half = 96: start and end of a tile's inner loop, which wait for memory and take as long in float8. t0: gap between
kernels, in s. Times are in s.
Roofline: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from d9d_loop.planning.hardware_spec import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
HALF_DEPTH = 96
HALF_REUSE = 20
UNALIGNED = 0.3
"""Speed of a product with rows of an odd size, relative to an aligned product: 80 of 250 TFLOP/s on an A100."""


def _costs() -> tuple[tuple[int, int, float], ...]:
    """Return the height and width of each tile, and its number of elements divided by its relative speed."""
    reuse = [(a, b, a * b / (a + b)) for a, b in TILES]
    best = max(i / (i + HALF_REUSE) for _, _, i in reuse)
    return tuple((a, b, a * b * best * (i + HALF_REUSE) / i) for a, b, i in reuse)


_COSTS = _costs()


class LinearSeconds(NamedTuple):
    """Times of the products of a linear layer: forward, and gradients of the inputs and of the weight."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        """Time of both gradients."""
        return self.input_gradient + self.weight_gradient


def linear_seconds(
    hardware: Hardware, tokens: float, outputs: float, inputs: float, *, batch: float = 1, dtype: str = "bf16"
) -> LinearSeconds:
    """Return the times of the products of `batch` linear layers.

    Rows of all operands have the size of the inputs or of the outputs, so the number of tokens does not affect
    alignment.
    """
    aligned = not (outputs % 2 or inputs % 2)

    def seconds(m: float, n: float, k: float) -> float:
        return matmul_seconds(hardware, m, n, k, batch=batch, dtype=dtype, aligned=aligned)

    return LinearSeconds(
        forward=seconds(tokens, outputs, inputs),
        input_gradient=seconds(tokens, inputs, outputs),
        weight_gradient=seconds(inputs, outputs, tokens),
    )


def matmul_seconds(
    hardware: Hardware, m: float, n: float, k: float, *, batch: float = 1, dtype: str = "bf16", aligned: bool = True
) -> float:
    """Return the time of `batch` products of m x k and k x n matrices with 2 bytes per element."""
    device, fitted = hardware.device, hardware.fitted
    share = fitted.matmul_efficiency * (1.0 if aligned else UNALIGNED) / device.num_multiprocessors
    depth = k / peak_of(hardware, dtype) + HALF_DEPTH / peak_of(hardware, "bf16")
    seconds = 2 * _elements(m, n, batch, device.num_multiprocessors) * depth / share
    moved = 2 * batch * (m * k + k * n + m * n)
    roof = device.memory_bandwidth * fitted.memory_efficiency
    return max(seconds, moved / roof) + device.kernel_seconds


@lru_cache(maxsize=4096)
def _elements(m: float, n: float, batch: float, num_multiprocessors: int) -> float:
    """Return the elements that a multiprocessor computes one after another, at the speed of the largest tile."""
    return min(ceil(batch * ceil(m / a) * ceil(n / b) / num_multiprocessors) * cost for a, b, cost in _COSTS)


def pointwise_seconds(hardware: Hardware, num_bytes: float, *, num_kernels: float = 1) -> float:
    """Return the time of kernels that read and write `num_bytes` in all."""
    roof = hardware.device.memory_bandwidth * hardware.fitted.memory_efficiency
    return num_bytes / roof + num_kernels * hardware.device.kernel_seconds


def attention_seconds(
    hardware: Hardware, flops: float, *, keys: float, head_dim: float, num_tiles: float, backward: bool = False
) -> float:
    """Return the time of a fused attention kernel.

    The forward pass reaches `attention_efficiency` of the peak on long sequences with heads of 128 elements. The
    backward pass reaches 80 % of that rate. Short sequences and small heads are slower: see `attention_fill`. Source:
    Dao 2023, https://arxiv.org/abs/2307.08691, figures 4 to 6. `num_tiles` is the number of query tiles of all heads,
    which run on the multiprocessors in waves.
    """
    device = hardware.device
    waves = ceil(num_tiles / device.num_multiprocessors)
    share = num_tiles / (waves * device.num_multiprocessors)
    rate = (
        peak_of(hardware, "bf16")
        * hardware.fitted.attention_efficiency
        * attention_fill(keys, head_dim)
        * share
        * (0.8 if backward else 1.0)
    )
    return flops / rate + device.kernel_seconds


def attention_fill(keys: float, head_dim: float) -> float:
    """Return the speed of attention on `keys` tokens, relative to long sequences with heads of 128 elements."""
    return min(1.0, keys / (keys + 256) * head_dim / (head_dim + 32) * 1.25)


def peak_of(hardware: Hardware, dtype: str) -> float:
    """Return the peak rate of matrix products in a dtype, in FLOP/s; bf16's if the data sheet has no other."""
    peaks = hardware.device.peak_flops
    return peaks.get(dtype, peaks["bf16"])
