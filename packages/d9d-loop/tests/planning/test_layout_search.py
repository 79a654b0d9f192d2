"""Layout search: which layouts are valid, which fit into memory, and their order."""

from dataclasses import replace
from itertools import pairwise

import pytest

from d9d_dist import UserError
from d9d_loop.planning import (
    DecoderShape,
    Hardware,
    PlanLayout,
    SearchSpace,
    describe,
    legal_layouts,
    memory_of,
    nearest_layouts,
    search_layouts,
    step_time,
)
from d9d_loop.planning.layout_search import (
    Evaluation,
    MemoryScale,
    mesh_config,
    microbatch_activations,
    num_changes,
    worst_memory,
)
from d9d_loop.planning.memory_size import CONTEXT_BYTES, FRAGMENTATION
from d9d_loop.planning.schedule_time import scheduled_step_time
from d9d_loop.planning.step_model import stage_layers
from d9d_pipeline import DualPipeV, Schedule, ZeroBubble1P, ZeroBubbleV, build

QWEN3_30B = DecoderShape(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    num_experts=128,
    top_k=8,
    expert_size=768,
)
HARDWARE = Hardware.load("h100-dgx")


def test_every_layout_is_a_mesh_of_all_devices() -> None:
    layouts = list(legal_layouts(QWEN3_30B, HARDWARE, SearchSpace(world_size=16, global_size=16, length=4096)))
    assert len(layouts) > 500
    for layout in layouts:
        mesh_config(layout).resolve(16)
        assert layout.dp * layout.microbatch_size * layout.num_microbatches == 16
        assert QWEN3_30B.num_kv_heads % layout.tp == 0


@pytest.mark.full
def test_layouts_are_sorted_and_fit() -> None:
    found = search_layouts(QWEN3_30B, HARDWARE, SearchSpace(world_size=16, global_size=16, length=4096))
    seconds = [each.seconds for each in found.fitting]
    assert seconds == sorted(seconds)
    assert all(worst_memory(QWEN3_30B, each.layout).total <= HARDWARE.device.memory_bytes for each in found.fitting)
    assert all(each.time == step_time(QWEN3_30B, each.layout, HARDWARE) for each in found.fitting[::20])
    front = found.pareto()
    assert all(a.memory.total > b.memory.total for a, b in pairwise(front))


def test_the_nearest_layouts_have_the_fewest_changes() -> None:
    """The memory of every layout is scaled by the exact memory of the job over its closed form."""
    layout = PlanLayout(dp=4, tp=2, microbatch_size=2, length=4096, recompute="full")
    scale = MemoryScale(state=1.1, rest=0.9)
    found = list(nearest_layouts(QWEN3_30B, HARDWARE, SearchSpace.of(layout, 8), scale=scale))
    keys = [(num_changes(layout, each.layout), each.seconds) for each in found]
    assert keys
    assert keys == sorted(keys)
    legal = legal_layouts(QWEN3_30B, HARDWARE, SearchSpace(world_size=8, global_size=8, length=4096))
    fits = {each: scale.apply(worst_memory(QWEN3_30B, each)).total <= HARDWARE.device.memory_bytes for each in legal}
    assert {each.layout for each in found} == {
        each for each, does_fit in fits.items() if does_fit and num_changes(layout, each)
    }


DENSE_8B = DecoderShape(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
)


def test_the_nearest_layout_of_a_replicated_job_is_the_same_with_sharding() -> None:
    layout = PlanLayout(dp=8, length=4096, recompute="full", sharding="replicated", shard_ranks=1)
    assert worst_memory(DENSE_8B, layout).total > HARDWARE.device.memory_bytes
    best = next(nearest_layouts(DENSE_8B, HARDWARE, SearchSpace.of(layout, 8), scale=MemoryScale()))
    assert best.layout == replace(layout, sharding="parameters", shard_ranks=None)
    assert num_changes(layout, best.layout) == 1
    assert "dp=1x8 (replicate x shard)" in describe(best.layout)
    assert (mesh_config(layout).data_parallel_replicate, mesh_config(layout).data_parallel_shard) == (8, 1)


def test_a_search_for_a_job_considers_its_number_of_replicas() -> None:
    layout = PlanLayout(dp=8, length=4096, shard_ranks=4)
    legal = legal_layouts(DENSE_8B, HARDWARE, SearchSpace.of(layout, 8))
    meshes = [mesh_config(each) for each in legal if each.dp == 8]
    assert {(each.data_parallel_replicate, each.data_parallel_shard) for each in meshes} == {(1, 8), (2, 4)}
    for mesh in meshes:
        mesh.resolve(8)


def test_a_search_balances_the_stages_of_each_layout_by_the_cost_of_the_tower() -> None:
    job = PlanLayout(dp=8, length=4096, tower_layers=1.4)
    costs = {
        (each.tp * each.cp, each.num_stages): each.virtual_layers
        for each in legal_layouts(DENSE_8B, HARDWARE, SearchSpace.of(job, 8))
    }
    assert costs[1, 2] == (1, 0)
    assert costs[2, 2] == (3, 0)
    assert all(wanted == (round(1.4 * parts), 0) for (parts, count), wanted in costs.items() if parts * count <= 8)
    large = SearchSpace.of(replace(job, tower_layers=1e3), 8)
    stages = [stage_layers(DENSE_8B, each, 0) for each in legal_layouts(DENSE_8B, HARDWARE, large)]
    assert min(stages) == (1, 0)  # each stage keeps a layer


@pytest.mark.slow("schedule0")
@pytest.mark.parametrize("schedule", [ZeroBubble1P(stages_per_rank=2), ZeroBubbleV(), DualPipeV()])
def test_a_search_for_a_job_has_the_bubbles_of_its_schedule(schedule: Schedule) -> None:
    """The search rounds times and simulates few microbatches; the plan of a job simulates its own program."""
    base = PlanLayout(pp=4, dp=2, stages_per_rank=2, placement=schedule.placement, num_microbatches=32, length=4096)
    space = SearchSpace.of(base, 64, schedule)
    found = search_layouts(DENSE_8B, Hardware.load("b200-dgx"), space, keep=None)
    pipelines = [each for each in found.fitting if each.layout.pp > 1 and not each.layout.offload][::19]
    assert {each.layout.pp for each in pipelines} >= {2, 4}
    for each in pipelines:
        layout = each.layout
        assert layout.stages_per_rank == 2
        program = build(schedule, num_ranks=layout.pp, num_microbatches=layout.num_microbatches)
        exact = scheduled_step_time(DENSE_8B, layout, Hardware.load("b200-dgx"), schedule=schedule, program=program)
        assert each.seconds == pytest.approx(exact.total, rel=0.02)


def test_a_search_omits_layouts_that_the_schedule_does_not_support() -> None:
    """DualPipeV needs two microbatches per rank."""
    space = SearchSpace(world_size=8, global_size=16, length=4096, schedule=DualPipeV())
    layouts = list(legal_layouts(DENSE_8B, HARDWARE, space))
    assert {each.pp for each in layouts} == {1, 2, 4, 8}
    assert all(each.num_microbatches >= 2 * each.pp for each in layouts)


@pytest.mark.parametrize("factors", [(0.5, 0.25), (2.0, 3.0)])
def test_the_closed_form_is_scaled_in_both_directions(factors: tuple[float, float]) -> None:
    layout = PlanLayout(dp=8, num_microbatches=4, length=4096)
    closed = worst_memory(DENSE_8B, layout)
    state = factors[0] * (closed.parameters + closed.optimizer)
    rest = factors[1] * (closed.gradients + closed.activations + closed.gathered + closed.loss)
    scale = MemoryScale.of(DENSE_8B, layout, state_bytes=state, rest_bytes=rest)
    assert (scale.state, scale.rest) == pytest.approx(factors)
    scaled = scale.apply(closed)
    assert scaled.model == pytest.approx(state + rest)
    reserved = state + rest + factors[1] * closed.cached
    assert scaled.total == pytest.approx(CONTEXT_BYTES + (1 + FRAGMENTATION) * reserved)  # the context is not scaled


def test_a_chunked_loss_needs_no_more_memory_for_longer_microbatches() -> None:
    """A chunk of 1,024 tokens has 14 bytes for each of the 128,256 logits of a token."""
    for size in (1, 4):
        layout = PlanLayout(dp=8, microbatch_size=size, length=4096, loss_chunk=1024)
        assert worst_memory(DENSE_8B, layout).loss == pytest.approx(1024 * 128256 * 14)
    short = PlanLayout(dp=8, length=512, loss_chunk=1024)
    assert worst_memory(DENSE_8B, short).loss == pytest.approx(512 * 128256 * 14)


def test_logits_at_labels_need_memory_in_proportion_to_the_microbatch() -> None:
    """A sixteenth of the tokens has a label; a context-parallel rank may have all labels of its rows."""
    base = PlanLayout(dp=8, num_microbatches=4, length=4096, logit_share=1 / 16)
    layouts = legal_layouts(DENSE_8B, HARDWARE, SearchSpace.of(base, 32))
    found = {
        (each.cp, each.microbatch_size): worst_memory(DENSE_8B, each).loss
        for each in layouts
        if each.tp == each.pp == 1 and each.cp in {1, 2, 8}
    }
    assert {size for cp, size in found if cp == 1} == {1, 2, 4}
    for (_, size), loss in found.items():
        assert loss == pytest.approx(256 * size * 128256 * 14)
    half = replace(base, cp=8, dp=1, logit_share=0.5)  # a rank has 512 tokens of a row with 2,048 labels
    assert worst_memory(DENSE_8B, half).loss == pytest.approx(512 * 128256 * 14)


def test_offload_moves_the_activations_of_every_microbatch_once_each_way() -> None:
    """The last rank needs most memory here, for the logits; it has one microbatch in flight, the first one four."""
    layout = PlanLayout(pp=4, dp=2, num_microbatches=8, length=4096, recompute="full")
    kept = microbatch_activations(DENSE_8B, layout)
    assert worst_memory(DENSE_8B, layout).loss > 0
    assert kept == 4096 * 8 * 2 * 4096  # tokens, layers, bytes, hidden size
    slow = HARDWARE.model_copy(update={"device": HARDWARE.device.model_copy(update={"host_bandwidth": 1e6})})
    plain, offloaded = (
        Evaluation(DENSE_8B, slow)(each, memory_of(DENSE_8B, each, 0))
        for each in (layout, replace(layout, offload=True))
    )
    hidden = 0.8 * plain.time.compute
    assert offloaded.seconds - plain.seconds == pytest.approx(2 * 8 * kept / 1e6 - hidden)


def test_the_search_for_a_model_that_fits_nowhere_returns_the_smallest_layout() -> None:
    found = search_layouts(QWEN3_30B, HARDWARE, SearchSpace(world_size=1, global_size=1, length=4096))
    assert found.fitting == ()
    assert found.smallest.layout.recompute == "full"


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match=r"no layout of 16 devices is legal for batch\.global_size = 0"):
        search_layouts(QWEN3_30B, HARDWARE, SearchSpace(world_size=16, global_size=0, length=4095))
