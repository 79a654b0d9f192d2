"""Times of matrix products: large ones reach the peak's fraction, small ones use smaller tiles."""

import pytest

from d9d_loop.planning import Hardware
from d9d_loop.planning.kernel_time import (
    HALF_DEPTH,
    UNALIGNED,
    attention_fill,
    attention_seconds,
    linear_seconds,
    matmul_seconds,
    peak_of,
    pointwise_seconds,
)

HARDWARE = Hardware.load("a100-80-dgx")


def test_a_product_of_full_waves_reaches_the_fraction_of_the_peak() -> None:
    m, n, k = 256 * 12, 128 * 9, 2**16  # 108 tiles of 256 x 128 are one wave
    rate = HARDWARE.device.peak_flops["bf16"] * HARDWARE.fitted.matmul_efficiency
    seconds = matmul_seconds(HARDWARE, m, n, k) - HARDWARE.device.kernel_seconds
    assert seconds == pytest.approx(2 * m * n * (k + HALF_DEPTH) / rate)


def test_float8_halves_the_inner_loop_of_a_tile_but_not_its_start_and_end() -> None:
    hardware = Hardware.load("h100-dgx")
    assert hardware.device.peak_flops["fp8"] == pytest.approx(2 * hardware.device.peak_flops["bf16"], rel=1e-3)
    gap = hardware.device.kernel_seconds
    half, whole = (matmul_seconds(hardware, 2**14, 2**14, k, dtype="fp8") - gap for k in (1024, 2048))
    bf16 = matmul_seconds(hardware, 2**14, 2**14, 1024) - gap
    assert whole - half == pytest.approx(bf16 * 512 / (1024 + HALF_DEPTH), rel=1e-3)
    assert half / bf16 == pytest.approx((512 + HALF_DEPTH) / (1024 + HALF_DEPTH), rel=1e-3)


def test_only_odd_weight_sizes_slow_products_down() -> None:
    """With 4095 tokens, the products are as fast as with 4096; with one odd size, all three are slower."""
    even, fewer, outputs, inputs = (
        linear_seconds(HARDWARE, *sizes)
        for sizes in ((4096, 4096, 4096), (4095, 4096, 4096), (4096, 4095, 4096), (4096, 4096, 4095))
    )
    assert fewer == pytest.approx(even, rel=1e-3)
    for odd in (outputs, inputs):
        assert odd == pytest.approx([each / UNALIGNED for each in even], rel=0.02)


def test_a_small_product_uses_small_tiles() -> None:
    # One wave of 256 x 128 tiles would take as long for 32 tiles as for 108.
    small, full = (matmul_seconds(HARDWARE, m, n, 2**16) for m, n in ((1024, 1024), (256 * 12, 128 * 9)))
    assert small < full / 2


def test_the_three_products_of_a_linear_layer_sum_over_inputs_outputs_and_tokens() -> None:
    """Whole waves of 36 x 36 tiles for each product, so the times are as their depths."""
    forward, inputs, weight = linear_seconds(HARDWARE, 128 * 36, 256 * 36, 128 * 72)
    gap = HARDWARE.device.kernel_seconds
    assert (forward - gap) / (inputs - gap) == pytest.approx((128 * 72 + HALF_DEPTH) / (256 * 36 + HALF_DEPTH))
    assert (weight - gap) / (inputs - gap) == pytest.approx(2 * (128 * 36 + HALF_DEPTH) / (256 * 36 + HALF_DEPTH))


def test_each_product_of_a_batch_has_its_own_tiles() -> None:
    """216 products are two waves of the 108 multiprocessors, however few elements they have."""
    one, two, larger = (
        matmul_seconds(HARDWARE, size, size, 4096, batch=batch) - HARDWARE.device.kernel_seconds
        for size, batch in ((1, 108), (1, 216), (8, 216))
    )
    assert two == larger == pytest.approx(2 * one)


def test_small_products_and_pointwise_kernels_are_bound_by_memory() -> None:
    device = HARDWARE.device.model_copy(update={"memory_bandwidth": 1.0, "kernel_seconds": 10.0})
    slow = HARDWARE.model_copy(update={"device": device})
    efficiency = HARDWARE.fitted.memory_efficiency
    moved = 7 * 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert matmul_seconds(slow, 2, 3, 5, batch=7) == pytest.approx(moved / efficiency + 10)
    assert pointwise_seconds(slow, 100, num_kernels=3) == pytest.approx(100 / efficiency + 30)


def test_attention_fills_waves_and_is_slower_in_the_backward_pass() -> None:
    """162 tiles are one and a half waves of 108 multiprocessors, which take as long as two."""
    peak = HARDWARE.device.peak_flops["bf16"] * HARDWARE.fitted.attention_efficiency
    for backward, speed in ((False, 0.75), (True, 0.75 * 0.8)):
        seconds = attention_seconds(HARDWARE, 1e15, keys=2**40, head_dim=128, num_tiles=162, backward=backward)
        assert seconds == pytest.approx(1e15 / (peak * speed) + HARDWARE.device.kernel_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "head_dim", "speed"), [(2**40, 128, 1), (256, 128, 0.5), (2**40, 32, 0.625), (2**40, 256, 1)]
)
def test_short_sequences_and_small_heads_slow_attention_down(keys: int, head_dim: int, speed: float) -> None:
    assert attention_fill(keys, head_dim) == pytest.approx(speed)


def test_a_dtype_that_is_not_on_the_data_sheet_has_the_peak_of_bf16() -> None:
    peaks = Hardware.load("h100-dgx").device.peak_flops
    assert [peak_of(Hardware.load("h100-dgx"), dtype) for dtype in ("fp8", "fp4")] == [peaks["fp8"], peaks["bf16"]]
