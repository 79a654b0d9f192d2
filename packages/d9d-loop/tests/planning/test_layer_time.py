"""Times of layers: experts, quantization and overlapped tensor parallelism."""

from dataclasses import replace

import pytest

from d9d_loop.planning import DecoderShape, Hardware, PlanLayout
from d9d_loop.planning.layer_time import head_time, layer_time
from d9d_loop.planning.overlap import CONTENTION

HARDWARE = Hardware.load("h100-dgx")
SPARSE = DecoderShape(
    vocab_size=32000,
    hidden_size=2048,
    num_layers=24,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=4096,
    num_experts=64,
    top_k=8,
    expert_size=768,
)
LAYOUT = PlanLayout(dp=16, ep=16, pointwise="fused")


def test_the_head_and_attention_are_not_quantized() -> None:
    whole, quantized = (replace(LAYOUT, dtype=each) for each in ("bf16", "fp8"))
    assert head_time(SPARSE, whole, HARDWARE) == head_time(SPARSE, quantized, HARDWARE)
    slow, fast = (layer_time(SPARSE, each, HARDWARE, sparse=False).forward for each in (whole, quantized))
    assert fast.attention == slow.attention
    assert slow.matmul / 2 < fast.matmul < slow.matmul


def test_quantization_moves_four_bytes_for_each_input() -> None:
    whole, quantized = (
        layer_time(SPARSE, replace(LAYOUT, dtype=each), HARDWARE, sparse=False).forward.pointwise
        for each in ("bf16", "fp8")
    )
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    inputs = LAYOUT.length * (
        2048 + 16 * 128 + 2048 + 4096
    )  # of the products before and after attention and activation
    assert quantized - whole == pytest.approx(4 * inputs / roof)


def test_a_product_for_each_expert_takes_longer_and_launches_more_operators() -> None:
    grouped, looped = (
        layer_time(SPARSE, replace(LAYOUT, groups_experts=each), HARDWARE, sparse=True) for each in (True, False)
    )
    assert looped.forward.matmul > grouped.forward.matmul
    fewer, more = (
        layer_time(SPARSE, replace(LAYOUT, groups_experts=False, ep=ep), HARDWARE, sparse=True).forward.operators
        for ep in (16, 8)
    )
    assert more - fewer == 2 * (64 / 8 - 64 / 16)


def test_tokens_cross_the_network_once_for_each_node() -> None:
    """With 2 nodes, nearly each token has an expert on the other node, and 5 ranks there: 1 instead of 5 rows."""
    rows, nodes, adjacent = (
        layer_time(SPARSE, replace(LAYOUT, **traits), HARDWARE, sparse=True).forward.expert
        for traits in ({}, {"deduplicates_nodes": True}, {"deduplicates_nodes": True, "adjacent_experts": True})
    )
    assert rows > 2 * nodes > 2 * adjacent
    hidden = layer_time(SPARSE, replace(LAYOUT, overlaps_experts=True), HARDWARE, sparse=True).forward.expert
    assert hidden == pytest.approx(CONTENTION * rows)


def test_overlapped_tensor_parallelism_exposes_the_first_part_and_the_contention() -> None:
    layout = PlanLayout(tp=2, microbatch_size=4, pointwise="fused")
    plain, hidden = (
        layer_time(SPARSE, replace(layout, overlaps_tensor=each), HARDWARE, sparse=False).forward
        for each in (False, True)
    )
    assert plain.tensor < plain.matmul
    assert hidden.tensor == pytest.approx((1 + CONTENTION) / 2 * plain.tensor)


def test_a_faster_attention_kernel_takes_less_time() -> None:
    one, two = (
        layer_time(SPARSE, replace(LAYOUT, attention_speed=each), HARDWARE, sparse=False).backward.attention
        for each in (1, 2)
    )
    gap = HARDWARE.device.kernel_seconds
    assert one - gap == pytest.approx(2 * (two - gap))
