"""Times of matrix products: large ones reach the peak's fraction, small ones use smaller tiles."""

import pytest

from d9d_loop.planning import Hardware
from d9d_loop.planning.kernel_time import HALF_DEPTH, UNALIGNED, linear_seconds, matmul_seconds

HARDWARE = Hardware.load("a100-80-dgx")


def test_a_product_of_full_waves_reaches_the_fraction_of_the_peak() -> None:
    m, n, k = 256 * 12, 128 * 9, 2**16  # 108 tiles of 256 x 128 are one wave
    rate = HARDWARE.device.peak_flops["bf16"] * HARDWARE.fitted.matmul_efficiency
    seconds = matmul_seconds(HARDWARE, m, n, k) - HARDWARE.device.kernel_seconds
    assert seconds == pytest.approx(2 * m * n * (k + HALF_DEPTH) / rate)


def test_only_odd_weight_sizes_slow_products_down() -> None:
    """With 4095 tokens, the products are as fast as with 4096; with an odd output size, all three are slower."""
    even, fewer, odd = (
        linear_seconds(HARDWARE, tokens, outputs, 4096)
        for tokens, outputs in ((4096, 4096), (4095, 4096), (4096, 4095))
    )
    assert fewer == pytest.approx(even, rel=1e-3)
    assert odd == pytest.approx([each / UNALIGNED for each in even], rel=0.02)


def test_a_small_product_uses_small_tiles() -> None:
    # One wave of 256 x 128 tiles would take as long for 32 tiles as for 108.
    small, full = (matmul_seconds(HARDWARE, m, n, 2**16) for m, n in ((1024, 1024), (256 * 12, 128 * 9)))
    assert small < full / 2
