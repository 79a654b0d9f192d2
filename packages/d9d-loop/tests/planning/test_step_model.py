"""Predicted step times: the parts add up, and move as expected."""

from dataclasses import replace

import pytest

from d9d_loop.planning import DecoderShape, Hardware, PlanLayout, step_time
from d9d_loop.planning.layer_time import layer_time
from d9d_loop.planning.step_model import PARTS

SHAPE = DecoderShape.gpt(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200, length=2048)
LAYOUT = PlanLayout(tp=8, pp=2, dp=4, num_microbatches=16, length=2048, recompute="full")
HARDWARE = Hardware.load("a100-80-dgx")


def test_parts_add_up_to_the_step() -> None:
    time = step_time(SHAPE, LAYOUT, HARDWARE)
    assert sum(getattr(time, name) for name in PARTS) == pytest.approx(time.total, rel=1e-9)


def test_recomputation_costs_a_third_of_compute() -> None:
    full = step_time(SHAPE, LAYOUT, HARDWARE)
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
    )
    assert step_time(SHAPE, layout, HARDWARE).total == pytest.approx(1.42, rel=0.1)


def test_the_head_is_not_hidden_behind_launches_of_layers() -> None:
    """Layers of a small model wait for the host; a vocabulary that is eight times larger still adds its time."""
    times = []
    for vocab in (51200, 8 * 51200):
        shape = DecoderShape.gpt(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=vocab, length=1024)
        times.append(step_time(shape, PlanLayout(length=1024, sharding="replicated"), HARDWARE))
    assert times[0].launch > times[0].total / 3
    # The larger head needs 2 m n k x 3 more FLOPs; not even the peak rate can do them in the time of the layers.
    assert times[1].total - times[0].total > 6 * 1024 * 1024 * 7 * 51200 / 3.12e14


def test_sequence_parallelism_exposes_the_gather_of_gradients() -> None:
    """Two all-gathers of a layer's backward pass overlap no weight gradient, two all-reduces do."""
    layout = replace(LAYOUT, overlaps_weight_gradients=True, microbatch_size=4, recompute="none")
    split, whole = (
        layer_time(SHAPE, replace(layout, sequence_parallel=each), HARDWARE, sparse=False) for each in (True, False)
    )
    assert whole.backward.tensor == 0
    assert split.backward.tensor == pytest.approx(split.forward.tensor / 2)
