"""Predicted step times: the parts add up, and move as expected."""

from dataclasses import replace

import pytest

from d9d_dist import MeshConfig
from d9d_loop.planning import DecoderShape, Hardware, PlanLayout, step_time
from d9d_loop.planning.layer_time import layer_time
from d9d_loop.planning.plan_layout import Sharding
from d9d_loop.planning.step_model import PARTS, group_seconds, layers_of, parameter_groups

SHAPE = DecoderShape.gpt(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200, length=2048)
LAYOUT = PlanLayout(tp=8, pp=2, dp=4, num_microbatches=16, length=2048, recompute="full")
HARDWARE = Hardware.load("a100-80-dgx")


SPARSE = DecoderShape(
    vocab_size=32000,
    hidden_size=1024,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=4096,
    num_experts=32,
    top_k=2,
    expert_size=4096,
)
FLAT = HARDWARE.model_copy(
    update={
        "devices_per_node": 1,
        "network": HARDWARE.network.model_copy(update={"bandwidth": 1.0, "latency": 1e-30, "oversubscription": 1.0}),
        "fitted": HARDWARE.fitted.model_copy(update={"network_efficiency": 1.0}),
    }
)
"""Cluster whose collectives take as many seconds as a rank sends bytes."""


def _with(**constants: float) -> Hardware:
    """Return the hardware with the given fitted constants."""
    return HARDWARE.model_copy(update={"fitted": HARDWARE.fitted.model_copy(update=constants)})


def test_parts_add_up_to_the_step() -> None:
    time = step_time(SHAPE, LAYOUT, HARDWARE)
    assert sum(getattr(time, name) for name in PARTS) == pytest.approx(time.total, rel=1e-9)


def test_recomputation_costs_a_third_of_compute() -> None:
    layout = replace(LAYOUT, recomputes_last=True, reduces_each_microbatch=True)  # whole layers, no sums of gradients
    full = step_time(SHAPE, layout, HARDWARE)
    assert full.recompute / full.compute == pytest.approx(1 / 3, abs=0.03)
    assert step_time(SHAPE, replace(LAYOUT, recompute="none"), HARDWARE).recompute == 0


def test_more_microbatches_have_a_smaller_bubble() -> None:
    few, many = (step_time(SHAPE, replace(LAYOUT, num_microbatches=m), HARDWARE) for m in (4, 64))
    assert many.bubble / many.total < few.bubble / few.total / 5


def test_korthikanti_22b() -> None:
    """Table 5 of https://arxiv.org/abs/2205.05198: 1.42 s with full recomputation on 8 A100."""
    layout = PlanLayout(
        tp=8,
        microbatch_size=4,
        length=2048,
        recompute="full",
        sharding="replicated",
        sequence_parallel=False,
        flash=False,
        causal=False,
        dropout=True,
        pointwise="fused",
        overlaps_weight_gradients=True,
    )
    assert step_time(SHAPE, layout, HARDWARE).total == pytest.approx(1.42, rel=0.1)


def test_the_head_is_not_hidden_behind_launches_of_layers() -> None:
    """Layers of a small model wait for the host; a vocabulary that is four times larger still adds its time."""
    passes = []
    for vocab in (51200, 4 * 51200):
        shape = DecoderShape.gpt(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=vocab, length=1024)
        time = step_time(shape, PlanLayout(length=1024, sharding="replicated"), _with(host_seconds=5e-5))
        assert time.launch > time.total / 4
        passes.append(time.total - time.optimizer)
    # Forward and backward of the added rows of the head take 6 FLOPs per token and weight.
    assert passes[1] - passes[0] > 6 * 1024 * 1024 * 3 * 51200 / HARDWARE.device.peak_flops["bf16"]


def test_sequence_parallelism_exposes_the_gather_of_gradients() -> None:
    """Two all-gathers of a layer's backward pass overlap no weight gradient, two all-reduces do."""
    layout = replace(LAYOUT, overlaps_weight_gradients=True, microbatch_size=4, recompute="none")
    split, whole = (
        layer_time(SHAPE, replace(layout, sequence_parallel=each), _with(link_efficiency=0.8), sparse=False)
        for each in (True, False)
    )
    assert whole.backward.tensor == 0
    assert split.backward.tensor == pytest.approx(split.forward.tensor / 2)


def test_stages_have_whole_layers_and_early_ones_the_remainder() -> None:
    shape = replace(SHAPE, num_layers=10, num_experts=8, expert_size=64, top_k=2, num_dense_layers=4)
    layout = replace(LAYOUT, pp=2, stages_per_rank=2)  # stages of 3, 3, 2 and 2 layers; rank 0 has the first and third
    assert [layers_of(shape, layout, rank) for rank in range(2)] == [(3, 2), (1, 4)]
    assert [layers_of(replace(SHAPE, num_layers=10), replace(LAYOUT, pp=4), rank) for rank in range(4)] == [
        (3, 0),
        (3, 0),
        (2, 0),
        (2, 0),
    ]


def test_v_shaped_schedules_have_the_head_on_the_first_rank() -> None:
    layout = replace(LAYOUT, stages_per_rank=2, placement="v")
    shape = replace(SHAPE, num_layers=10)  # stages of 3, 3, 2 and 2 layers; rank 0 has the first and the last
    assert [layers_of(shape, layout, rank)[0] for rank in range(2)] == [5, 5]
    assert [layers_of(shape, replace(layout, placement="loop"), rank)[0] for rank in range(2)] == [5, 5]
    assert [layers_of(replace(SHAPE, num_layers=9), layout, rank)[0] for rank in range(2)] == [5, 4]
    untied = replace(shape, tie_embeddings=False)
    held = [sum(each.size for each in parameter_groups(untied, layout, rank)) for rank in range(2)]
    ends = (untied.embedding_parameters + untied.head_parameters) / layout.tp
    assert held[0] - held[1] == pytest.approx(ends)


def test_eager_pointwise_operators_move_twice_the_bytes_of_fused_ones() -> None:
    eager, fused, compiled = (
        layer_time(SHAPE, replace(LAYOUT, pointwise=each), HARDWARE, sparse=False).forward.pointwise
        for each in ("eager", "fused", "compiled")
    )
    gaps = layer_time(SHAPE, replace(LAYOUT, length=1, pointwise="fused"), HARDWARE, sparse=False).forward.pointwise
    assert eager - gaps == pytest.approx(2 * (fused - gaps), rel=0.01)
    assert compiled - gaps == pytest.approx(0.6 * (fused - gaps), rel=0.01)


def test_virtual_layers_reduce_the_layers_of_the_first_and_last_stage() -> None:
    layout = replace(LAYOUT, pp=4, virtual_layers=(1, 2))
    assert [layers_of(replace(SHAPE, num_layers=10), layout, rank)[0] for rank in range(4)] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("pp", "reduces", "of_gradients"), [(1, True, 3 * 6), (1, False, 8), (2, True, 3 * 6), (2, False, 8)]
)
def test_fsdp_copies_gathered_weights_and_gradients(pp: int, reduces: bool, of_gradients: int) -> None:
    """Weights are read and written in bf16 after each gather, and gradients are cast, or copied in fp32, once reduced.

    Each of the 3 microbatches gathers twice, but parameters outside of layers once; stages gather once a step.
    """
    layout = PlanLayout(dp=4, pp=pp, num_microbatches=3, length=2048, reduces_each_microbatch=reduces)
    copied, bare = (step_time(SHAPE, replace(layout, copies_shards=each), HARDWARE).compute for each in (True, False))
    (group,) = parameter_groups(SHAPE, layout, pp - 1)
    gathered = 3 * (2 * group.size - group.outside) if pp == 1 else group.size
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    assert copied - bare == pytest.approx((4 * gathered + of_gradients * group.size) / roof, rel=1e-3)


def test_microbatches_add_their_gradients_to_whole_ones() -> None:
    """FSDP2 casts the first bf16 gradients (6 bytes per parameter), and adds the others to sums in fp32 (10 bytes)."""
    layout = PlanLayout(dp=4, num_microbatches=3, length=2048, copies_shards=False)
    whole, reduced = (
        step_time(SHAPE, replace(layout, reduces_each_microbatch=each), HARDWARE).compute for each in (False, True)
    )
    size = sum(each.size for each in parameter_groups(SHAPE, layout, 0))
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    assert whole - reduced == pytest.approx((6 + 2 * 10) * size / roof + 3 * HARDWARE.device.kernel_seconds, rel=1e-3)


@pytest.mark.parametrize(("first", "times"), [(False, 3), (True, 4)])
def test_the_first_microbatch_adds_its_gradients_only_to_a_buffer_of_zeros(first: bool, times: int) -> None:
    layout = PlanLayout(num_microbatches=4, length=2048, sharding="replicated", accumulates_first=first)
    none, added = (step_time(SHAPE, replace(layout, accumulation_bytes=each), HARDWARE).compute for each in (0, 6))
    size = sum(each.size for each in parameter_groups(SHAPE, layout, 0))
    roof = HARDWARE.device.memory_bandwidth * HARDWARE.fitted.memory_efficiency
    assert added - none == pytest.approx(times * 6 * size / roof + 4 * HARDWARE.device.kernel_seconds, rel=1e-3)
    one = replace(layout, num_microbatches=1, accumulation_bytes=6)
    again = (
        step_time(SHAPE, one, HARDWARE).compute - step_time(SHAPE, replace(one, accumulation_bytes=0), HARDWARE).compute
    )
    assert (again > 0) == first


def test_nothing_hides_the_parameters_outside_of_layers() -> None:
    """A fast network leaves their gather and scatter, those of one layer, and no gather in the backward pass."""
    fast = FLAT.model_copy(update={"network": FLAT.network.model_copy(update={"bandwidth": 1e12})})
    layout = PlanLayout(dp=8, length=8192, num_microbatches=3)
    dense = parameter_groups(SHAPE, layout, 0)[0]
    one = (dense.size - dense.outside) / 48
    time = step_time(SHAPE, layout, fast)
    gathers = 3 * 2 * (dense.outside + one)
    assert time.data == pytest.approx(7 / 8 * (gathers + 4 * (dense.outside + one)) / 1e12)
    whole = 3 * 2 * (2 * dense.size - dense.outside) + 4 * dense.size
    assert time.data + time.hidden == pytest.approx(7 / 8 * whole / 1e12)
    each = step_time(SHAPE, replace(layout, reduces_each_microbatch=True), fast)
    assert each.data == pytest.approx(7 / 8 * (gathers + 3 * 4 * (dense.outside + one)) / 1e12)


def test_a_captured_graph_does_not_wait_for_the_host() -> None:
    """Graphs of the router, and also of attention, leave fewer operators to launch; a graph of the step leaves none."""
    shape = replace(SPARSE, hidden_size=512, expert_size=128)
    slow = _with(host_seconds=5e-5)
    times = [
        step_time(shape, PlanLayout(length=512, captured=each), slow)
        for each in ("none", "router", "attention", "step")
    ]
    launched = [each.launch for each in times]
    assert launched[0] > times[0].total / 4
    assert launched == sorted(launched, reverse=True)
    assert launched[3] == pytest.approx(0, abs=1e-12)


def test_experts_of_all_ranks_are_neither_gathered_nor_reduced() -> None:
    """With as many expert-parallel as data-parallel ranks, no two ranks hold the same experts."""
    dense = replace(SPARSE, num_experts=0, expert_size=0, intermediate_size=1, top_k=0)
    for sharding in ("parameters", "optimizer"):
        layout = PlanLayout(dp=16, ep=16, length=1024, sharding=sharding, overlaps_gradients=False)
        sparse = step_time(SPARSE, layout, HARDWARE).data
        assert sparse == pytest.approx(step_time(dense, replace(layout, ep=1), HARDWARE).data, rel=0.02)


def test_on_a_device_without_overlap_transfers_and_copies_of_shards_are_exposed() -> None:
    """On a CPU, hooks and copies add to the transfers of 48 layers: 49 gathers, 48 again, and 49 scatters."""
    layout = PlanLayout(dp=4, length=2048, num_microbatches=2, reduces_each_microbatch=True)
    device = HARDWARE.device.model_copy(update={"overlaps": False, "shard_seconds": 1e-3})
    hidden = step_time(SHAPE, layout, HARDWARE)
    exposed = step_time(SHAPE, layout, HARDWARE.model_copy(update={"device": device}))
    assert exposed.hidden == 0
    assert exposed.data == pytest.approx(hidden.data + hidden.hidden + 2 * (49 + 48 + 49) * 1e-3)


@pytest.mark.parametrize(
    ("replicate", "shard", "cp", "tp", "ep"), [(8, 8, 1, 1, 8), (1, 8, 1, 8, 1), (1, 1, 1, 8, 2), (2, 2, 2, 2, 4)]
)
def test_experts_are_sharded_over_the_ranks_of_their_mesh(
    replicate: int, shard: int, cp: int, tp: int, ep: int
) -> None:
    mesh = MeshConfig(
        data_parallel_replicate=replicate,
        data_parallel_shard=shard,
        context_parallel_shard=cp,
        tensor_parallel=tp,
        expert_parallel=ep,
    )
    shards = shard * cp
    layout = PlanLayout(
        dp=replicate * shard,
        cp=cp,
        tp=tp,
        ep=ep,
        sharding="parameters" if shards > 1 else "replicated",
        shard_ranks=shards,
    )
    dense, experts = parameter_groups(SPARSE, layout, 0)
    domain = mesh.domains()["expert"]
    assert (experts.ranks, experts.shards, experts.stride) == (domain["ep_replicate"], domain["ep_replicate"], ep)
    assert experts.size * ep == SPARSE.num_layers * SPARSE.expert_parameters
    assert (dense.ranks, dense.shards, dense.stride) == (replicate * shards, shards, tp)


def test_replicas_reduce_the_shards_of_each_kind_of_parameters() -> None:
    """64 ranks are 8 replicas of 8 shards. 8 ranks hold the same experts, and either shard or replicate them."""
    layout = PlanLayout(dp=64, ep=8, shard_ranks=8)
    for shards_experts in (True, False):
        dense, experts = parameter_groups(SPARSE, replace(layout, shards_experts=shards_experts), 0)
        gather, scatter, reduction = group_seconds(dense, layout, FLAT)
        assert gather == pytest.approx(7 / 8 * 2 * dense.size)
        assert scatter == pytest.approx(7 / 8 * 4 * dense.size)
        assert reduction == pytest.approx(2 * 7 / 8 * 4 * dense.size / 8)
        gather, scatter, reduction = group_seconds(experts, layout, FLAT)
        if shards_experts:
            assert (gather, scatter) == pytest.approx((7 / 8 * 2 * experts.size, 7 / 8 * 4 * experts.size))
            assert reduction == 0
        else:
            assert (gather, scatter) == (0, 0)
            assert reduction == pytest.approx(2 * 7 / 8 * 4 * experts.size)


def test_sharding_in_part_moves_at_least_the_bytes_of_replicas() -> None:
    """Reduce-scatter and all-reduce over 8 x 8 ranks send about as many bytes as one all-reduce over 64 ranks."""
    for shards_experts in (True, False):
        layout = PlanLayout(dp=64, ep=8, shards_experts=shards_experts, overlaps_gradients=False)
        replicated, hybrid, sharded = (
            step_time(SPARSE, each, FLAT).data
            for each in (
                replace(layout, sharding="replicated"),
                replace(layout, shard_ranks=8),
                replace(layout, shard_ranks=64),
            )
        )
        assert hybrid > 0.9 * replicated
        assert sharded > 0.9 * replicated


def test_tensor_parallel_ranks_gather_whole_experts() -> None:
    """Without expert parallelism, a rank gathers 8 times as many experts as with 8 expert-parallel ranks."""
    one, eight = (
        group_seconds(parameter_groups(SPARSE, layout, 0)[1], layout, FLAT)[0]
        for layout in (PlanLayout(dp=8, tp=8, ep=8), PlanLayout(dp=8, tp=8))
    )
    assert eight == pytest.approx(8 * one, rel=0.13)


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("sharding", ["replicated", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (1, 4), (2, 8)])
def test_exposed_and_hidden_transfers_are_the_whole(sharding: Sharding, pp: int, m: int, reduces: bool) -> None:
    layout = PlanLayout(dp=16, pp=pp, num_microbatches=m, sharding=sharding, reduces_each_microbatch=reduces)
    hidden, whole = (step_time(SPARSE, replace(layout, overlaps_gradients=each), HARDWARE) for each in (True, False))
    assert whole.hidden == 0
    assert 0 < hidden.data <= whole.data
    assert hidden.data + hidden.hidden == pytest.approx(whole.data)


def test_transfers_of_a_step_hide_behind_one_microbatch() -> None:
    """A pipeline stage gathers and scatters once per step, so more microbatches do not hide more."""
    slow = HARDWARE.model_copy(update={"network": HARDWARE.network.model_copy(update={"bandwidth": 1e9})})
    layout = PlanLayout(tp=8, dp=16, pp=2, num_microbatches=4, length=2048)
    few, many = (step_time(SHAPE, replace(layout, num_microbatches=m), slow) for m in (4096, 65536))
    assert few.data == pytest.approx(many.data)
    assert few.data > 2 * few.hidden
    gradients = step_time(SHAPE, replace(layout, sharding="gradients"), slow)
    assert few.data == pytest.approx(gradients.data, rel=0.02)
    alone = replace(layout, pp=1, dp=32)
    once, each = (step_time(SHAPE, replace(alone, reduces_each_microbatch=each), slow) for each in (False, True))
    assert each.data + each.hidden > once.data + once.hidden
