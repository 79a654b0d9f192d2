"""Search of layouts: what is legal, what fits, and the order."""

from itertools import pairwise

import pytest

from d9d_dist import UserError
from d9d_loop.planning import (
    DecoderShape,
    Hardware,
    PlanLayout,
    legal_layouts,
    nearest_layouts,
    search_layouts,
    step_time,
)
from d9d_loop.planning.layout_search import mesh_config, num_changes, worst_memory
from d9d_loop.planning.memory_size import CONTEXT_BYTES, FRAGMENTATION

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
    layouts = list(legal_layouts(QWEN3_30B, HARDWARE, world_size=16, global_size=16, length=4096))
    assert len(layouts) > 500
    for layout in layouts:
        mesh_config(layout).resolve(16)
        assert layout.dp * layout.microbatch_size * layout.num_microbatches == 16
        assert QWEN3_30B.num_kv_heads % layout.tp == 0


@pytest.mark.full
def test_layouts_are_sorted_and_fit() -> None:
    found = search_layouts(QWEN3_30B, HARDWARE, world_size=16, global_size=16, length=4096)
    seconds = [each.seconds for each in found.fitting]
    assert seconds == sorted(seconds)
    assert all(worst_memory(QWEN3_30B, each.layout).total <= HARDWARE.device.memory_bytes for each in found.fitting)
    assert all(each.time == step_time(QWEN3_30B, each.layout, HARDWARE) for each in found.fitting[::20])
    front = found.pareto()
    assert all(a.memory.total > b.memory.total for a, b in pairwise(front))


def test_the_nearest_layouts_have_the_fewest_changes() -> None:
    """The exact memory of the job is 1.1 times the closed form, so the memory of every layout is scaled by it."""
    layout = PlanLayout(dp=4, tp=2, microbatch_size=2, length=4096, recompute="full")
    exact = 1.1 * worst_memory(QWEN3_30B, layout).model
    found = list(nearest_layouts(QWEN3_30B, HARDWARE, layout, global_size=8, model_bytes=exact))
    keys = [(num_changes(layout, each.layout), each.seconds) for each in found]
    assert keys
    assert keys == sorted(keys)
    legal = legal_layouts(QWEN3_30B, HARDWARE, world_size=8, global_size=8, length=4096)
    limit = (HARDWARE.device.memory_bytes - CONTEXT_BYTES) / (1 + FRAGMENTATION) / 1.1
    assert {each.layout for each in found} == {
        each for each in legal if worst_memory(QWEN3_30B, each).model <= limit and num_changes(layout, each)
    }


def test_a_model_that_fits_nowhere_has_a_smallest_layout() -> None:
    found = search_layouts(QWEN3_30B, HARDWARE, world_size=1, global_size=1, length=4096)
    assert found.fitting == ()
    assert found.smallest.layout.recompute == "full"


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match=r"no layout of 16 devices is legal for batch\.global_size = 0"):
        search_layouts(QWEN3_30B, HARDWARE, world_size=16, global_size=0, length=4095)
