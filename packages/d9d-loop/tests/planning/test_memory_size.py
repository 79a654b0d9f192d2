"""Memory in closed form against the equations of the papers, and the measured rows of Korthikanti et al."""

from dataclasses import replace
from typing import Any

import pytest

from d9d_loop.planning import DecoderShape, PlanLayout, memory_of
from d9d_loop.planning.memory_size import activation_bytes_per_token
from d9d_pipeline import ZeroBubbleV, build, verify

SPARSE = DecoderShape(
    vocab_size=1000,
    hidden_size=256,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    intermediate_size=512,
    num_experts=32,
    top_k=2,
    expert_size=256,
)
SMALL = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=64)


def test_a_gpt_layer_needs_34_h_per_token() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=1, num_heads=8, vocab_size=100, length=64)
    layout = PlanLayout(dropout=True, recompute="none")
    # Beyond the paper's 34 h, the fused kernel keeps its output and the input of the projection as one tensor.
    assert activation_bytes_per_token(shape, layout, sparse=False) == 34 * 1024


def test_scores_are_stored_without_a_fused_kernel() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=1, num_heads=8, vocab_size=100, length=64)
    fused = activation_bytes_per_token(shape, PlanLayout(length=64), sparse=False)
    stored = activation_bytes_per_token(shape, PlanLayout(length=64, flash=False), sparse=False)
    assert stored - fused == 5 * 8 * 64


def test_the_22b_model_of_korthikanti() -> None:
    shape = DecoderShape.gpt(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200, length=2048)
    layout = PlanLayout(
        tp=8,
        microbatch_size=4,
        length=2048,
        recompute="selective",
        flash=False,
        dropout=True,
        sharding="replicated",
        stored_weight_bytes=2,
        master_bytes=12,
    )
    memory = memory_of(shape, layout, 0)
    assert memory.saved / 2**30 == pytest.approx(55.125, rel=0.02)


def test_context_parallelism_gathers_the_keys_and_values_of_the_whole_sequence() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=1, num_heads=8, vocab_size=100, length=64)
    alone, split = (activation_bytes_per_token(shape, PlanLayout(length=64, cp=cp), sparse=False) for cp in (1, 4))
    assert split - alone == 3 * 2 * 2 * 1024


def test_ring_attention_holds_fp32_gradients_and_gathered_keys_in_its_backward_pass() -> None:
    """Per token, 16 + 10 x 4 tensors of 8 x 128 values replace the 12 that a layer keeps, and its feed-forward ones."""
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=4096)
    layout = PlanLayout(cp=4, dp=2, recompute="full")
    plain, ring = (memory_of(shape, replace(layout, ring_attention=each), 0) for each in (False, True))
    counted = 2 * (2 + 2 * 4) * 1024 + 2 * 4 * 1024 * 2
    assert ring.layer - plain.layer == 1024 * ((16 + 40) * 2 * 1024 - counted) + 2 * 4 * 128 * 4096
    assert ring.forward == plain.forward
    one = replace(layout, cp=1, dp=8)
    assert memory_of(shape, replace(one, ring_attention=True), 0) == memory_of(shape, one, 0)


def test_unsharded_gradients_are_kept_if_only_the_last_microbatch_reduces() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=64)
    layout = PlanLayout(dp=8, num_microbatches=2, length=64)
    whole = memory_of(shape, layout, 0).gradients
    reduced = memory_of(shape, replace(layout, reduces_each_microbatch=True), 0).gradients
    assert whole == pytest.approx(8 * reduced)
    assert memory_of(shape, replace(layout, num_microbatches=1), 0).gradients == reduced


def test_recomputing_every_fourth_layer_saves_a_quarter_of_recomputing_all() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=64)
    kept, again, fourth = (
        activation_bytes_per_token(shape, PlanLayout(recompute=kind, recompute_every=every), sparse=False)
        for kind, every in (("none", 1), ("full", 1), ("full", 4))
    )
    assert fourth == (3 * kept + again) / 4


def test_gathered_logits_are_not_divided_by_the_tensor_parallel_degree() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=64)
    layout = PlanLayout(tp=4, length=64, loss_bytes=8)
    assert memory_of(shape, layout, 0).loss == 64 * 100 * 8 / 4
    assert memory_of(shape, replace(layout, gathers_logits=True), 0).loss == 64 * 100 * 8


def test_a_whole_embedding_is_held_by_each_tensor_parallel_rank() -> None:
    shape = DecoderShape.gpt(hidden_size=1024, num_layers=8, num_heads=8, vocab_size=100, length=64)
    layout = PlanLayout(tp=4, length=64)
    split, whole = (memory_of(shape, replace(layout, splits_embedding=each), 0) for each in (True, False))
    added = shape.embedding_parameters * 3 / 4
    assert whole.parameters - split.parameters == added * layout.stored_weight_bytes
    assert whole.optimizer - split.optimizer == added * layout.master_bytes


@pytest.mark.parametrize(("tp", "ep", "shard_ranks"), [(1, 1, 16), (1, 4, 4), (4, 1, 4), (4, 8, 1), (2, 32, 2)])
def test_each_expert_weight_is_stored_once_in_a_job(tp: int, ep: int, shard_ranks: int) -> None:
    """All ranks with the same experts shard them, however the other parameters are sharded."""
    layout = PlanLayout(dp=16, tp=tp, ep=ep, shard_ranks=shard_ranks, length=64)
    sparse, dense = (memory_of(each, layout, 0).parameters for each in (SPARSE, replace(SPARSE, expert_size=0)))
    assert (sparse - dense) * layout.world_size == pytest.approx(8 * SPARSE.expert_parameters * 4)


def test_experts_are_sharded_as_other_parameters_if_a_framework_does_so() -> None:
    layout = PlanLayout(dp=16, ep=4, sharding="optimizer", shards_experts=False, length=64)
    memory = memory_of(SPARSE, layout, 0)
    experts = 8 * SPARSE.expert_parameters / 4
    dense = SPARSE.num_parameters - 8 * SPARSE.expert_parameters - 17 * SPARSE.hidden_size  # norms are not counted
    assert memory.parameters == pytest.approx(4 * (dense + experts))
    assert memory.optimizer == pytest.approx(8 * (dense / 16 + experts / 4))


@pytest.mark.parametrize(
    ("changes", "gathers"), [({}, 3), ({"overlaps_tensor": True}, 1), ({"sequence_parallel": False}, 0)]
)
def test_a_recomputed_layer_gathers_its_inputs(changes: dict[str, Any], gathers: int) -> None:
    layout = PlanLayout(tp=4, length=64, recompute="full", **changes)
    memory = memory_of(SMALL, layout, 0)
    layer = 64 * activation_bytes_per_token(SMALL, replace(layout, recompute="none"), sparse=False)
    assert memory.activations == 64 * 8 * 2 * 1024 / (1 if gathers == 0 else 4)
    assert memory.forward == pytest.approx(layer + gathers * 64 * 2 * 1024)


def test_v_shaped_placement_has_the_loss_on_the_first_rank_and_equal_activations_on_all() -> None:
    shape = replace(SPARSE, num_experts=0)
    layout = PlanLayout(pp=4, stages_per_rank=2, placement="v", num_microbatches=12, length=64)
    first, *others = (memory_of(shape, layout, rank) for rank in range(4))
    assert first.loss > 0
    assert all(each.loss == 0 for each in others)
    kept = layout.tokens_per_microbatch * activation_bytes_per_token(shape, layout, sparse=False)  # one layer a stage
    peaks = verify(build(ZeroBubbleV(), num_ranks=4, num_microbatches=12)).peak_activations
    assert [each.activations for each in (first, *others)] == [peak * kept for peak in peaks]


def test_sharded_gradients_and_optimizer_state_are_divided_and_weights_are_not() -> None:
    memory = memory_of(SMALL, PlanLayout(dp=4, sharding="gradients", length=64), 0)
    assert (memory.gradients, memory.optimizer) == pytest.approx((memory.parameters / 4, memory.parameters * 2 / 4))
    assert memory.gathered == 0


def test_two_layers_are_gathered_at_a_time_and_other_parameters_during_the_whole_step() -> None:
    """Weights and their gradients have 2 bytes, reduced gradients 4; one layer has 12 h^2 parameters."""
    memory = memory_of(SMALL, PlanLayout(dp=8, length=64), 0)
    layer, outside = 12 * 1024**2, (100 + 64) * 1024
    assert memory.gathered == 2 * outside
    assert memory.forward == 2 * 2 * layer
    assert memory.layer == (2 * 2 + 2 + 4) * layer
    assert memory.buffers == 2 * layer
    alone = memory_of(SMALL, PlanLayout(length=64), 0)
    assert (alone.gathered, alone.layer, alone.buffers) == (0, 0, 0)


def test_a_pipeline_stage_stays_gathered_and_holds_the_borders_of_microbatches_in_flight() -> None:
    memory = memory_of(SMALL, PlanLayout(dp=8, pp=2, num_microbatches=4, length=64), 0)
    layer, outside = 12 * 1024**2, (100 + 64) * 1024
    assert memory.gathered == 2 * (4 * layer + outside)
    assert (memory.forward, memory.layer) == (0, (2 + 4) * layer)
    assert memory.buffers == 2 * layer + 2 * 2 * 64 * 2 * 1024  # two microbatches: an output and a gradient of each


def test_loss_and_layer_are_not_allocated_together_but_both_are_reserved() -> None:
    shape = replace(SMALL, vocab_size=100_000)
    memory = memory_of(shape, PlanLayout(length=64, recompute="full"), 0)
    layer = 64 * 32 * 1024  # 34 h without the two masks of dropout
    assert (memory.loss, memory.forward) == (64 * 100_000 * 14, layer)
    assert memory.model == memory.saved + memory.loss
    assert memory.reserved == pytest.approx(1.03 * (memory.saved + memory.loss + layer))
    assert memory.total == memory.reserved + 1.5 * 2**30


@pytest.mark.parametrize(
    ("shape", "layout", "num_bytes"),
    [
        # Norms and residuals are whole on each rank, 8 h; attention, 8 h, and feed-forward layer, 16 h, are split.
        (SMALL, PlanLayout(tp=4, sequence_parallel=False), (8 + 8 / 4 + 16 / 4) * 1024),
        (SMALL, PlanLayout(tp=4), (8 + 8 + 16) / 4 * 1024),
        # 8 h; queries and keys of 48, values and outputs of 32; three tensors of the gated layer.
        (
            replace(SPARSE, num_experts=0, latent=(64, 64, 16, 32)),
            PlanLayout(),
            8 * 256 + 2 * 8 * 2 * (48 + 32) + 6 * 512,
        ),
        # As above, with heads of 32; inputs of two experts; three tensors of two experts and of the shared one.
        (replace(SPARSE, shared_size=128), PlanLayout(), 8 * 256 + 8 * 256 + 2 * 2 * 256 + 6 * (2 * 256 + 128)),
        # The layer's input and attention's output; half of the outputs of queries, keys, values and two products.
        (
            replace(SPARSE, num_experts=0),
            PlanLayout(recompute="selective", saved_products=0.5, pointwise="compiled"),
            2 * 256 + 2 * 256 + 0.5 * 2 * (3 * 256 + 2 * 512),
        ),
        # The same, with half of the two outputs that are added to the residual stream.
        (
            replace(SPARSE, num_experts=0),
            PlanLayout(recompute="selective", saved_products=0.5),
            2 * 256 + 2 * 256 + 0.5 * 2 * (3 * 256 + 2 * 512 + 2 * 256),
        ),
    ],
)
def test_saved_bytes_of_a_layer(shape: DecoderShape, layout: PlanLayout, num_bytes: float) -> None:
    assert activation_bytes_per_token(shape, layout, sparse=shape.num_experts > 0) == num_bytes


@pytest.mark.parametrize(
    ("rank", "v", "m", "in_flight"),
    [(0, 1, 8, 4), (1, 1, 8, 3), (3, 1, 8, 1), (0, 1, 2, 2), (0, 2, 8, 4 * (1 + 3 / 8)), (0, 2, 4, 4), (1, 2, 8, 3)],
)
def test_microbatches_in_flight_of_a_pipeline_rank(rank: int, v: int, m: int, in_flight: float) -> None:
    layout = PlanLayout(pp=4, stages_per_rank=v, num_microbatches=m, length=64)
    kept = 64 * 2 * activation_bytes_per_token(SMALL, layout, sparse=False)  # two layers of a rank
    assert memory_of(SMALL, layout, rank).activations == pytest.approx(in_flight * kept)


def test_offload_keeps_the_activations_of_two_layers() -> None:
    layout = PlanLayout(length=64, offload=True)
    layer = 64 * activation_bytes_per_token(SMALL, layout, sparse=False)
    assert memory_of(SMALL, layout, 0).activations == 2 * layer


def test_one_recomputed_sparse_layer_is_whole() -> None:
    layout = PlanLayout(length=64, recompute="full")
    layer = 64 * activation_bytes_per_token(SPARSE, replace(layout, recompute="none"), sparse=True)
    memory = memory_of(SPARSE, layout, 0)
    assert (memory.activations, memory.layer) == (64 * 8 * 2 * 256, layer)


def test_the_measured_memory_of_published_steps() -> None:
    """GiB that torchtitan reserved, and that KempnerForge allocated, for Llama 70B."""
    llama_70b = DecoderShape(
        vocab_size=128256,
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
    )
    titan = PlanLayout(
        tp=8, dp=32, microbatch_size=16, length=8192, recompute="full", pointwise="compiled", loss_bytes=18
    )
    assert memory_of(llama_70b, titan, 0).reserved / 2**30 == pytest.approx(71.9, rel=0.05)
    kempner = PlanLayout(
        tp=4,
        dp=40,
        microbatch_size=2,
        num_microbatches=4,
        length=4096,
        recompute="full",
        kept_gradient_bytes=2,
        stored_weight_bytes=2,
        master_bytes=4,
        loss_bytes=8,
        splits_embedding=False,
        gathers_logits=True,
    )
    assert memory_of(llama_70b, kempner, 0).model / 2**30 == pytest.approx(82.9, rel=0.05)
