"""Times of pipelines from the simulation of the job's program, against the known bubbles of schedules."""

from dataclasses import replace

import pytest

from d9d_loop.planning import DecoderShape, Hardware, PlanLayout, step_time
from d9d_loop.planning.schedule_time import (
    ScheduleBubbles,
    StageTime,
    has_closed_form,
    relative_bubble,
    scheduled_step_time,
    simulated,
    stage_times,
)
from d9d_loop.planning.step_model import layer_times
from d9d_pipeline import (
    DualPipeV,
    GPipe,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
)

# So many layers that embedding and head do not matter.
SHAPE = DecoderShape.gpt(hidden_size=4096, num_layers=256, num_heads=32, vocab_size=1024, length=2048)
LAYOUT = PlanLayout(pp=8, dp=2, num_microbatches=16, length=2048, sharding="replicated")
HARDWARE = Hardware.load("h100-dgx")


def _stages(shape: DecoderShape, layout: PlanLayout) -> list[StageTime]:
    return stage_times(shape, layout, HARDWARE, layer_times(shape, layout, HARDWARE))


def _bubble(schedule: Schedule, **changes: object) -> float:
    """Return the bubble over the busy time of the slowest rank."""
    layout = replace(LAYOUT, stages_per_rank=schedule.stages_per_rank, placement=schedule.placement, **changes)
    program = build(schedule, num_ranks=layout.pp, num_microbatches=layout.num_microbatches)
    time = scheduled_step_time(SHAPE, layout, HARDWARE, schedule=schedule, program=program)
    parts = time.compute + time.recompute + time.launch + time.tensor + time.expert + time.context
    assert parts + time.bubble + time.data + time.optimizer == pytest.approx(time.total)
    return time.bubble / parts


def test_zero_bubble_1p_has_the_published_bubble() -> None:
    """The bubble falls from (p - 1)(F + B + W) to (p - 1)(F + B - W) (arXiv:2401.10241, table 1)."""
    plain, zero = _bubble(OneForwardOneBackward()), _bubble(ZeroBubble1P())
    stage = _stages(SHAPE, LAYOUT)[1]
    both = stage.forward + stage.backward_input
    assert plain == pytest.approx(7 / 16, rel=0.03)
    assert zero / plain == pytest.approx((both - stage.backward_weight) / (both + stage.backward_weight), rel=0.05)


def test_zero_bubble_v_has_a_smaller_bubble_than_interleaved_1f1b() -> None:
    assert _bubble(ZeroBubbleV()) < 0.7 * _bubble(Interleaved(2))


def test_a_bound_on_activations_costs_time() -> None:
    """A rank that may hold the activations of four microbatches cannot fill a pipeline of eight ranks."""
    assert _bubble(OneForwardOneBackward(max_activations=4)) > 1.2 * _bubble(OneForwardOneBackward())


@pytest.mark.parametrize(
    "schedule",
    [
        ZeroBubble1P(),
        ZeroBubble1P(stages_per_rank=2),
        ZeroBubbleV(),
        DualPipeV(),
        LoopedBreadthFirst(2),
        OneForwardOneBackward(max_activations=3),
    ],
)
@pytest.mark.parametrize("num_microbatches", [8, 9, 12, 13, 37])
def test_few_simulated_microbatches_give_the_bubble_of_all(schedule: Schedule, num_microbatches: int) -> None:
    first, other, last = StageTime(6, 11, 5), StageTime(5, 10, 5), StageTime(9, 14, 9)
    stages = (first, *[other] * (4 * schedule.stages_per_rank - 2), last)
    found = ScheduleBubbles(schedule, SHAPE, HARDWARE).bubble(4, num_microbatches, stages, 1)
    program = build(schedule, num_ranks=4, num_microbatches=num_microbatches)
    assert found == pytest.approx(num_microbatches * relative_bubble(simulated(program, stages, 1)))


def test_recomputation_belongs_to_the_first_half_of_the_backward_pass() -> None:
    layout = replace(LAYOUT, recomputes_last=True)
    plain, again = (_stages(SHAPE, replace(layout, recompute=each))[1] for each in ("none", "full"))
    assert again.backward_weight == plain.backward_weight
    assert again.backward_input - plain.backward_input == pytest.approx(plain.forward)


def test_only_gpipe_and_1f1b_have_a_closed_form() -> None:
    assert all(map(has_closed_form, (GPipe(), OneForwardOneBackward(), Interleaved(2))))
    assert not any(map(has_closed_form, (ZeroBubble1P(), ZeroBubbleV(), OneForwardOneBackward(max_activations=4))))
    program = build(OneForwardOneBackward(), num_ranks=8, num_microbatches=16)
    time = scheduled_step_time(SHAPE, LAYOUT, HARDWARE, schedule=OneForwardOneBackward(), program=program)
    assert time == step_time(SHAPE, LAYOUT, HARDWARE)


def test_stages_of_a_rank_have_their_own_times() -> None:
    shape = replace(SHAPE, num_layers=6)
    stages = _stages(shape, replace(LAYOUT, pp=2, stages_per_rank=2))
    assert stages[0].backward_weight == stages[1].backward_weight == pytest.approx(2 * stages[2].backward_weight)
    assert stages[0].forward > stages[1].forward  # the embedding
    assert stages[3].forward > stages[2].forward  # the head
