"""Predicted step times: the parts add up, and move as expected."""

from dataclasses import replace

import pytest

from d9d_loop.planning import DecoderShape, Hardware, PlanLayout, step_time
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
