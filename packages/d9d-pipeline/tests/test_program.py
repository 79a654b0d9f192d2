from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_pipeline import Action, Backward, Forward, ForwardOnly, GPipe, OneForwardOneBackward, Schedule, build


@given(schedule=st.sampled_from([GPipe(), OneForwardOneBackward()]), p=st.integers(1, 8), m=st.integers(1, 20))
def test_each_microbatch_goes_forward_and_backward_once_on_each_stage(schedule: Schedule, p: int, m: int) -> None:
    program = build(schedule, num_ranks=p, num_microbatches=m)
    assert program.num_stages == p
    for rank, actions in enumerate(program.ranks):
        assert sorted(a.microbatch for a in actions if isinstance(a, Forward)) == list(range(m))
        assert sorted(a.microbatch for a in actions if isinstance(a, Backward)) == list(range(m))
        assert {a.stage for a in actions} == {rank}


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_1f1b_holds_at_most_p_minus_r_microbatches(p: int, m: int) -> None:
    for rank, actions in enumerate(build(OneForwardOneBackward(), num_ranks=p, num_microbatches=m).ranks):
        held = peak = 0
        for action in actions:
            held += 1 if isinstance(action, Forward) else -1
            peak = max(peak, held)
        assert peak == min(p - rank, m)


def test_reads_as_a_line_for_each_rank() -> None:
    program = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=3)
    assert str(program) == "rank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"
    assert str(build(ForwardOnly(), num_ranks=1, num_microbatches=2)) == "rank 0: F0 F1"


class _Broken(Schedule):
    def __init__(self, actions: list[Action]) -> None:
        self._emitted = actions

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        yield from self._emitted


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(0, 0)], r"lacks Forward\(stage=0, microbatch=1\)"),
        ([Forward(0, 0), Forward(0, 1), Backward(0, 0)], r"lacks Backward\(stage=0, microbatch=1\)"),
        ([Forward(0, 0), Forward(0, 0), Forward(0, 1)], r"repeats Forward\(stage=0, microbatch=0\)"),
        ([Forward(0, 0), Forward(0, 1), Forward(1, 0)], r"has Forward\(stage=1, microbatch=0\), not its own"),
        (
            [Forward(0, 0), Backward(0, 1), Forward(0, 1), Backward(0, 0)],
            r"Backward\(stage=0, microbatch=1\) before its forward",
        ),
    ],
)
def test_refuses_a_program_that_computes_something_else(actions: list[Action], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(_Broken(actions), num_ranks=1, num_microbatches=2)


def test_refuses_no_microbatches() -> None:
    with pytest.raises(ValueError, match=r"got 1 ranks and 0 microbatches; expected at least one of each"):
        build(GPipe(), num_ranks=1, num_microbatches=0)
