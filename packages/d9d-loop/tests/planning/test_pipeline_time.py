"""Closed form of a pipeline's time against the simulation of its program."""

import pytest

from d9d_loop.planning.pipeline_time import pipeline_seconds
from d9d_pipeline import Backward, Forward, Interleaved, OneForwardOneBackward, build, simulate
from d9d_pipeline.actions import Compute


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_the_time_of_equal_stages_equals_the_simulation(num_ranks: int, num_microbatches: int) -> None:
    program = build(OneForwardOneBackward(), num_ranks=num_ranks, num_microbatches=num_microbatches)
    simulated = simulate(program, duration=lambda action: 1.0 if isinstance(action, Forward) else 2.0)
    seconds = pipeline_seconds([3.0] * num_ranks, num_microbatches=num_microbatches, overlaps=True)
    assert seconds == pytest.approx(simulated.makespan, rel=1e-12)


def test_the_time_of_interleaved_stages_equals_the_simulation() -> None:
    program = build(Interleaved(2), num_ranks=4, num_microbatches=8)
    simulated = simulate(program, duration=lambda action: 0.5 if isinstance(action, Forward) else 1.0)
    seconds = pipeline_seconds([3.0] * 4, num_microbatches=8, stages_per_rank=2, overlaps=True)
    assert seconds == pytest.approx(simulated.makespan, rel=1e-12)


def test_a_slow_last_stage_determines_the_time() -> None:
    slow = {3: 2.0}

    def duration(action: Compute) -> float:
        assert isinstance(action, Forward | Backward)
        return slow.get(action.stage, 1.0) * (1.0 if isinstance(action, Forward) else 2.0)

    program = build(OneForwardOneBackward(), num_ranks=4, num_microbatches=16)
    seconds = pipeline_seconds([3.0, 3.0, 3.0, 6.0], num_microbatches=16, overlaps=True)
    assert seconds == pytest.approx(simulate(program, duration=duration).makespan, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "overlaps", "expected"),
    [
        ([3.0] * 4, True, 8 * 3 + 3 * 3 / 2 + 2 * 3 * 0.5),
        ([3.0] * 4, False, 8 * 3 + 3 * 3 / 2 + 2 * 3 * 0.5 + 2 * 2 * 8 * 0.5),
        ([3.0], False, 24.0),
    ],
)
def test_sends_are_waited_for_while_the_pipeline_fills_or_always(
    ranks: list[float], overlaps: bool, expected: float
) -> None:
    """The first microbatch is sent 3 times each way; each of 2 stages of a rank sends and receives 8 microbatches."""
    seconds = pipeline_seconds(ranks, num_microbatches=8, stages_per_rank=2, transfer=0.5, overlaps=overlaps)
    assert seconds == pytest.approx(expected)
