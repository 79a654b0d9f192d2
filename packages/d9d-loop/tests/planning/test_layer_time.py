"""Times of layers: experts, quantization and overlapped tensor parallelism."""

from dataclasses import replace

import pytest

from d9d_loop.planning import DecoderShape, Hardware, PlanLayout
from d9d_loop.planning.collective_time import Span, collective_seconds
from d9d_loop.planning.kernel_time import linear_seconds
from d9d_loop.planning.layer_time import LAYER_PARTS, OVERLAP_OPERATORS, head_time, layer_time
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


@pytest.mark.parametrize(("dtype", "num_bytes"), [("fp8", 4), ("fp4", 5)])
def test_quantization_moves_bytes_for_each_input(dtype: str, num_bytes: int) -> None:
    """It reads 2 bytes, or twice to find the largest value first, and writes 1 or 1/2 byte by rows and by columns."""
    whole, quantized = (
        layer_time(SPARSE, replace(LAYOUT, dtype=each), HARDWARE, sparse=False).forward.pointwise
        for each in ("bf16", dtype)
    )
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    inputs = LAYOUT.length * (
        2048 + 16 * 128 + 2048 + 4096
    )  # of the products before and after attention and activation
    assert quantized - whole == pytest.approx(num_bytes * inputs / roof)


def test_a_compiler_does_not_fuse_quantization() -> None:
    """The scale depends on all values, so the operators that compute a tensor cannot also quantize it."""
    added = []
    for pointwise in ("fused", "compiled"):
        whole, quantized = (
            layer_time(SPARSE, replace(LAYOUT, pointwise=pointwise, dtype=each), HARDWARE, sparse=False)
            for each in ("bf16", "fp8")
        )
        added.append(
            [getattr(quantized, name).pointwise - getattr(whole, name).pointwise for name in ("forward", "backward")]
        )
    assert added[0] == pytest.approx(added[1])


def test_a_forced_balance_has_no_skew() -> None:
    """The latency, a tenth of it more with the default skew, is negligible here."""
    skewed, forced = (
        layer_time(SPARSE, replace(LAYOUT, length=65536, **each), HARDWARE, sparse=True).forward.expert
        for each in ({}, {"routing_skew": 1.0})
    )
    assert skewed == pytest.approx(1.1 * forced, rel=1e-3)


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


def test_every_second_layer_attends_to_a_window() -> None:
    """Without a window, a token sees 2048 keys on average; in a window of 128, 128 but for the first tokens."""
    whole, windowed = (
        layer_time(replace(SPARSE, window=each), LAYOUT, HARDWARE, sparse=True).forward.attention for each in (0, 128)
    )
    gap = HARDWARE.device.kernel_seconds
    assert (windowed - gap) / (whole - gap) == pytest.approx((2048 + 128 - 128**2 / 2 / 4096) / 2 / 2048)


@pytest.mark.parametrize(("grouped", "passes"), [(True, (11, 13)), (False, (22, 35))])
def test_biases_and_clamped_gates_read_and_write_the_rows_of_experts(grouped: bool, passes: tuple[int, int]) -> None:
    """Each of the 4096 tokens of a rank has 8 rows of 768 values, which a pass reads and writes with 2 bytes each."""
    plain, biased = (
        layer_time(replace(SPARSE, biased_experts=each), replace(LAYOUT, groups_experts=grouped), HARDWARE, sparse=True)
        for each in (False, True)
    )
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    one = 4096 * 8 * 768 * 2 * 2 / roof
    assert biased.forward.pointwise - plain.forward.pointwise == pytest.approx(passes[0] * one)
    assert biased.backward.pointwise - plain.backward.pointwise == pytest.approx(passes[1] * one)


def test_a_fused_gate_of_separate_experts_moves_only_biases() -> None:
    grouped, fused = (
        layer_time(replace(SPARSE, biased_experts=True), replace(LAYOUT, **traits), HARDWARE, sparse=True)
        for traits in ({}, {"groups_experts": False, "fuses_gate": True})
    )
    assert fused.forward.pointwise == pytest.approx(grouped.forward.pointwise)


@pytest.mark.parametrize(
    ("latent", "num_bytes"),
    [(None, 16 * (16 + 4) * 128), ((1536, 512, 64, 128), 16 * (16 * 64 + 8 * (128 + 64)))],
)
def test_a_rotation_in_separate_operators_moves_bytes_in_fp32(
    latent: tuple[int, int, int, int] | None, num_bytes: int
) -> None:
    """It moves 20 bytes per value of queries and keys, a kernel 4; latent attention rotates 64 of 192 per query."""
    shape = replace(SPARSE, latent=latent, num_kv_heads=4 if latent is None else 16)
    fused, separate = (
        layer_time(shape, replace(LAYOUT, fuses_rotary=each), HARDWARE, sparse=False) for each in (True, False)
    )
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    for name in ("forward", "backward"):
        added = getattr(separate, name).pointwise - getattr(fused, name).pointwise
        assert added == pytest.approx(4096 * num_bytes / roof)


def test_norms_in_separate_operators_move_bytes_in_fp32() -> None:
    """Two norms of 4096 x 2048 values on a rank move 32 bytes more per value forward and 84 backward."""
    fused, separate = (
        layer_time(SPARSE, replace(LAYOUT, fuses_norms=each), HARDWARE, sparse=False) for each in (True, False)
    )
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    for name, num_bytes in (("forward", 32), ("backward", 84)):
        added = getattr(separate, name).pointwise - getattr(fused, name).pointwise
        assert added == pytest.approx(2 * 4096 * 2048 * num_bytes / roof)


def test_gathered_logits_are_sent_and_the_loss_of_each_rank_reads_all_of_them() -> None:
    layout = PlanLayout(tp=4)
    split, whole = (head_time(SPARSE, replace(layout, gathers_logits=each), HARDWARE) for each in (False, True))
    size = 4096 * 32000
    gather = collective_seconds(HARDWARE, "all_gather", 2 * size, Span(4, 4))
    assert whole[0].tensor - split[0].tensor == pytest.approx(gather)
    assert whole[1].tensor == split[1].tensor
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    for one, other, num_bytes in zip(whole, split, (14, 22), strict=True):
        assert one.pointwise - other.pointwise == pytest.approx(3 / 4 * size * num_bytes / roof)


def test_the_backward_pass_has_its_own_number_of_collectives_only_if_sequences_are_split() -> None:
    layout = PlanLayout(tp=4, backward_collectives=1.75)
    for splits, ratio in ((True, 1.75), (False, 1.0)):
        time = layer_time(SPARSE, replace(layout, sequence_parallel=splits), HARDWARE, sparse=False)
        assert time.backward.tensor == pytest.approx(ratio * time.forward.tensor)


def test_ring_attention_hides_transfers_behind_its_parts_and_moves_bytes_between_them() -> None:
    """16 query heads of 128 values instead of 4 of keys and values are sent, in fp32 for gradients."""
    layout = PlanLayout(cp=4, dp=2, length=4096, ring_attention=True)
    alone = HARDWARE.model_copy(update={"devices_per_node": 1})
    slow = alone.model_copy(update={"network": alone.network.model_copy(update={"bandwidth": 1e8, "latency": 1e-12})})
    time = layer_time(SPARSE, layout, slow, sparse=False)
    unit, rate = 1024 * 16 * 128 * 2, 1e8 * slow.fitted.network_efficiency
    gather = 3 * 2 * unit / rate
    assert time.forward.context == pytest.approx(gather - time.forward.attention / 4)
    sends = 4 * 4 * unit / rate - 3 / 4 * time.backward.attention
    assert time.backward.context == pytest.approx(gather - time.backward.attention / 4 + sends)
    fast = alone.model_copy(update={"network": alone.network.model_copy(update={"bandwidth": 1e13, "latency": 1e-12})})
    hidden = layer_time(SPARSE, replace(layout, length=65536), fast, sparse=False)
    assert hidden.forward.context == 0
    last = 4 * 16 * unit / 1e13 / fast.fitted.network_efficiency
    assert hidden.backward.context == pytest.approx(last, rel=1e-4)
    plain = layer_time(SPARSE, replace(layout, ring_attention=False), slow, sparse=False)
    roof = slow.device.memory_bandwidth * slow.fitted.memory_efficiency
    assert time.forward.pointwise - plain.forward.pointwise == pytest.approx((6 + 3 * 20.25) * unit / roof)
    assert time.backward.pointwise - plain.backward.pointwise == pytest.approx((38 + 3 * 29.25) * unit / roof)


def test_recomputation_ends_before_the_last_product_of_a_dense_layer() -> None:
    """PyTorch stops at the input of the last product, so neither it nor the scatter of its outputs runs again."""
    layout = PlanLayout(tp=2, recompute="full", pointwise="fused")
    ended, whole = (
        layer_time(SPARSE, replace(layout, recomputes_last=each), HARDWARE, sparse=False) for each in (False, True)
    )
    assert whole.recompute == whole.forward
    last = linear_seconds(HARDWARE, 4096, 2048, 4096 / 2).forward
    assert whole.recompute.matmul - ended.recompute.matmul == pytest.approx(last)
    assert ended.recompute.tensor == pytest.approx(3 / 4 * whole.recompute.tensor)
    sparse = layer_time(SPARSE, layout, HARDWARE, sparse=True)
    assert sparse.recompute == sparse.forward


def test_a_loss_without_casts_moves_fewer_bytes() -> None:
    """4 instead of 14 bytes per logit forward, 8 instead of 22 backward; a compiled loss does not change."""
    eager = replace(LAYOUT, pointwise="eager")
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    whole, half = (head_time(SPARSE, replace(eager, casts_loss=each), HARDWARE) for each in (True, False))
    saved = [each.pointwise - other.pointwise for each, other in zip(whole, half, strict=True)]
    assert saved == pytest.approx([4096 * 32000 * each / roof for each in (10, 14)])
    one, two = (
        head_time(SPARSE, replace(eager, pointwise="compiled", casts_loss=each), HARDWARE) for each in (True, False)
    )
    assert one == two


def test_tokens_cross_the_network_once_for_each_node() -> None:
    """With 2 nodes, nearly every token has experts on 3 to 4 ranks of the other node; 1 row is sent instead."""
    ranks, nodes, adjacent = (
        layer_time(SPARSE, replace(LAYOUT, **traits), HARDWARE, sparse=True).forward.expert
        for traits in ({}, {"dispatch": "nodes"}, {"dispatch": "nodes", "adjacent_experts": True})
    )
    assert ranks > 2 * nodes > 2 * adjacent


def test_an_all_to_all_of_rows_sends_each_row_of_a_token() -> None:
    """Of 8 rows on 16 ranks, 16 (1 - (15/16)^8) = 6.45 go to different ranks; latencies are negligible here."""
    rows, ranks = (
        layer_time(SPARSE, replace(LAYOUT, length=2**20, dispatch=each), HARDWARE, sparse=True).forward.expert
        for each in ("rows", "ranks")
    )
    assert rows / ranks == pytest.approx(8 / (16 * (1 - (15 / 16) ** 8)), rel=1e-3)


def test_overlapped_all_to_alls_launch_each_part_of_a_layer_separately() -> None:
    plain, overlapped = (
        layer_time(SPARSE, replace(LAYOUT, overlaps_experts=each), HARDWARE, sparse=True) for each in (False, True)
    )
    for name in ("forward", "backward"):
        assert getattr(overlapped, name).operators - getattr(plain, name).operators == LAYER_PARTS * OVERLAP_OPERATORS


def test_an_all_to_all_of_rows_moves_them_twice_more() -> None:
    """It sorts rows by rank and then by expert: one more read and write of each row than other dispatchers."""
    rows, ranks = (
        layer_time(SPARSE, replace(LAYOUT, dispatch=each), HARDWARE, sparse=True) for each in ("rows", "ranks")
    )
    moved = LAYOUT.tokens_per_microbatch * SPARSE.top_k * SPARSE.hidden_size * 2 * 2
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    for name in ("forward", "backward"):
        added = getattr(rows, name).pointwise - getattr(ranks, name).pointwise
        assert added == pytest.approx(moved / roof)


def test_expert_transfers_also_overlap_waits_for_the_host() -> None:
    """Small layers wait for the host, which leaves more time to hide transfers over the network."""
    layout = replace(LAYOUT, length=512, ep=64, dp=64, overlaps_experts=True, groups_experts=False, dispatch="rows")
    slow, fast = (
        HARDWARE.model_copy(update={"fitted": HARDWARE.fitted.model_copy(update={"host_seconds": each})})
        for each in (1e-4, 1e-7)
    )
    waits, computes = (layer_time(SPARSE, layout, each, sparse=True).forward.expert for each in (slow, fast))
    assert waits < computes


def _sent_within_a_node(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the bytes that a rank sends to the 7 other ranks of its node in a dispatch, with the skew of 1.1."""
    ranks = 16 * (1 - (15 / 16) ** shape.top_k)
    return 1.1 * layout.length * shape.hidden_size * 2 * ranks * 7 / 16


@pytest.mark.parametrize("length", [4096, 16])
def test_expert_transfers_overlap_with_the_computation_of_the_layer(length: int) -> None:
    """Transfers hide behind the computation of long samples, but slow it down; for small experts, they exceed it."""
    shape = SPARSE if length > 1000 else replace(SPARSE, num_heads=1, num_kv_heads=1, expert_size=64, top_k=64)
    layout = replace(LAYOUT, length=length, groups_experts=True)
    at_once = HARDWARE.model_copy(update={"fitted": HARDWARE.fitted.model_copy(update={"host_seconds": 0.0})})
    bare, hidden = (
        layer_time(shape, replace(layout, overlaps_experts=each), at_once, sparse=True) for each in (False, True)
    )
    computation = sum(each.matmul + each.attention + each.pointwise for each in (bare.forward, bare.backward))
    seconds = 2 * bare.forward.expert
    links = 2 * 2 * _sent_within_a_node(shape, layout) / (450e9 * at_once.fitted.link_efficiency)
    share = min(1.0, links / seconds)
    expected = max(share * CONTENTION * min(seconds, computation), seconds - computation)
    assert hidden.forward.expert == hidden.backward.expert == pytest.approx(expected / 2)
    assert hidden.forward.expert >= (seconds - computation) / 2


def test_transfers_between_nodes_do_not_slow_experts_down() -> None:
    alone = HARDWARE.model_copy(update={"devices_per_node": 1})
    layout = replace(LAYOUT, length=16384, ep=2, overlaps_experts=True)
    fast = alone.model_copy(update={"network": alone.network.model_copy(update={"bandwidth": 4e11})})
    assert layer_time(SPARSE, layout, fast, sparse=True).forward.expert == 0


@pytest.mark.parametrize("num_experts", [60, 64, 100, 128, 160, 384])
def test_backward_products_of_experts_take_twice_the_forward_ones(num_experts: int) -> None:
    """Fractional numbers of rows per expert must not count as unaligned sizes."""
    shape = replace(SPARSE, num_experts=num_experts, top_k=6)
    time = layer_time(shape, PlanLayout(length=2**20), HARDWARE, sparse=True)
    assert time.backward.matmul / time.forward.matmul == pytest.approx(2, rel=0.05)


def test_a_sparse_layer_gathers_for_attention_only() -> None:
    """Only attention and a shared expert split over tensor-parallel ranks gather the tokens of other ranks."""
    shape = replace(SPARSE, shared_size=1536)
    layout = PlanLayout(tp=4, dp=4, pointwise="fused")
    pair = sum(
        collective_seconds(HARDWARE, name, 4096 * 2048 * 2, Span(4, 4)) for name in ("all_gather", "reduce_scatter")
    )
    for ep in (1, 8):
        time = layer_time(shape, replace(layout, ep=ep), HARDWARE, sparse=True)
        assert time.forward.tensor == pytest.approx(pair)
        assert time.backward.tensor == pytest.approx(1.5 * pair)
    split = replace(layout, splits_shared_experts=True)
    assert layer_time(shape, split, HARDWARE, sparse=True).forward.tensor == pytest.approx(2 * pair)
    assert layer_time(SPARSE, split, HARDWARE, sparse=True).forward.tensor == pytest.approx(pair)
    assert layer_time(shape, layout, HARDWARE, sparse=False).forward.tensor == pytest.approx(2 * pair)


def test_experts_of_tensor_parallel_ranks_share_the_tokens() -> None:
    """FLOPs of a sparse layer are divided by the tensor-parallel degree, with experts sharded or not."""
    shape = replace(SPARSE, shared_size=1536)
    layout = PlanLayout(length=2**18, pointwise="fused")
    gap = HARDWARE.device.kernel_seconds * 9
    one = layer_time(shape, layout, HARDWARE, sparse=True).forward.matmul - gap
    split = replace(layout, tp=4)
    for each in (split, replace(split, splits_shared_experts=True), replace(split, ep=4)):
        four = layer_time(shape, each, HARDWARE, sparse=True).forward.matmul - gap
        assert one / four == pytest.approx(4, rel=0.05)


def test_overlapped_tensor_parallelism_exposes_the_first_part_and_the_contention() -> None:
    layout = PlanLayout(tp=2, microbatch_size=4, pointwise="fused")
    plain, hidden = (
        layer_time(SPARSE, replace(layout, overlaps_tensor=each), HARDWARE, sparse=False).forward
        for each in (False, True)
    )
    assert plain.tensor < plain.matmul
    assert hidden.tensor == pytest.approx((1 + CONTENTION) / 2 * plain.tensor)


def test_overlapped_products_are_computed_in_parts_but_not_the_gradients_of_weights() -> None:
    layout = PlanLayout(tp=4, pointwise="fused", overlaps_tensor=True)
    time = layer_time(SPARSE, layout, HARDWARE, sparse=False)
    forward = backward = 0.0
    for outputs, inputs in ((768, 2048), (2048, 512), (1024, 2048), (1024, 2048), (2048, 1024)):
        part, whole = (linear_seconds(HARDWARE, tokens, outputs, inputs) for tokens in (4096 / 4, 4096))
        forward += 4 * part.forward
        backward += 4 * part.input_gradient + whole.weight_gradient
    assert time.forward.matmul == pytest.approx(forward)
    assert time.backward.matmul == pytest.approx(backward)


def test_a_faster_attention_kernel_takes_less_time() -> None:
    one, two = (
        layer_time(SPARSE, replace(LAYOUT, attention_speed=each), HARDWARE, sparse=False).backward.attention
        for each in (1, 2)
    )
    gap = HARDWARE.device.kernel_seconds
    assert one - gap == pytest.approx(2 * (two - gap))


def test_each_tensor_parallel_rank_reads_a_whole_shared_expert() -> None:
    """With few tokens, a product takes the time to read its weight: four times the bytes of a split one."""
    layout = PlanLayout(tp=4, length=64)
    without = layer_time(SPARSE, layout, HARDWARE, sparse=True).forward.matmul
    shape = replace(SPARSE, shared_size=2**16)
    whole, split = (
        layer_time(shape, replace(layout, splits_shared_experts=each), HARDWARE, sparse=True).forward.matmul - without
        for each in (False, True)
    )
    assert whole / split == pytest.approx(4, rel=0.15)


def test_the_head_computes_the_logits_of_a_share_of_the_tokens() -> None:
    """A quarter of four rows has as many logits as a row; the hidden states of all tokens are gathered."""
    row, rows = PlanLayout(tp=4, dp=2, length=4096), PlanLayout(tp=4, dp=2, length=4096, microbatch_size=4)
    one, four = (head_time(SPARSE, each, HARDWARE) for each in (row, rows))
    some = head_time(SPARSE, replace(rows, logit_share=0.25), HARDWARE)
    for few, many, found in zip(one, four, some, strict=True):
        assert (found.matmul, found.pointwise) == (few.matmul, few.pointwise)
        assert found.tensor == many.tensor > few.tensor
