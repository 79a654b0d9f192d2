"""Memory in closed form against the equations of the papers, and the measured rows of Korthikanti et al."""

import pytest

from d9d_loop.planning import DecoderShape, PlanLayout, memory_of
from d9d_loop.planning.memory_size import activation_bytes_per_token


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
    assert (memory.model - memory.loss) / 2**30 == pytest.approx(55.125, rel=0.02)
