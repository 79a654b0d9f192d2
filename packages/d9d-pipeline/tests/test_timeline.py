import pytest

from d9d_pipeline import (
    Backward,
    Forward,
    GPipe,
    OneForwardOneBackward,
    TimedAction,
    Timeline,
    build,
    format_simulation,
    simulate,
)
from d9d_pipeline.actions import Action, ComputeLoss, ReceiveInput


def timed(*actions: tuple[Action, float, float]) -> tuple[TimedAction, ...]:
    return tuple(TimedAction(*each) for each in actions)


MEASURED = Timeline(
    (
        timed((Forward(0, 0), 10.0, 12.0), (Backward(0, 0), 17.0, 20.0)),
        timed((ReceiveInput(1, 0, 0), 10.0, 12.5), (Forward(1, 0), 12.5, 14.0), (ComputeLoss(1, 0), 14.0, 14.5))
        + timed((Backward(1, 0), 14.5, 17.0)),
    ),
    unit="s",
)


def test_bubble_ignores_transfers() -> None:
    assert MEASURED.makespan == 10.0
    assert MEASURED.waiting == (5.0, 6.0)
    assert MEASURED.waiting_between == (5.0, 0.5)
    assert MEASURED.bubble == pytest.approx(0.55)


def test_all_times_of_an_empty_timeline_are_zero() -> None:
    nothing = Timeline(((), ()))
    assert (nothing.makespan, nothing.bubble, nothing.waiting_between) == (0.0, 0.0, (0.0, 0.0))
    assert str(nothing).splitlines()[1] == f"rank 1: {'.' * 100} 0 %"


def test_text_has_one_line_per_rank() -> None:
    timeline = simulate(build(OneForwardOneBackward(), num_ranks=2, num_microbatches=2))
    assert format_simulation(timeline, width=36).splitlines() == [
        "rank 0: F0--F1--........B0------....B1------ 33 %",
        "rank 1: ....F0--B0------F1--B1------........ 33 %",
    ]
    assert format_simulation(timeline, width=9).splitlines()[0] == "rank 0: FF..B-.B- 33 %"


def test_ranks_with_two_digits_are_aligned() -> None:
    lines = str(simulate(build(GPipe(), num_ranks=11, num_microbatches=1))).splitlines()
    assert lines[0].startswith("rank  0: F")
    assert lines[10].startswith("rank 10: ..")
    assert len({len(line) for line in lines}) == 1
