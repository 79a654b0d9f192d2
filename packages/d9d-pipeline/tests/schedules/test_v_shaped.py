import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_schedules import TorchZeroBubbleV

from d9d_dist import UserError
from d9d_pipeline import Costs, DualPipeV, Overlap, ZeroBubbleV, build, simulate, verify


@settings(max_examples=25)
@given(p=st.integers(1, 16), extra=st.integers(0, 48))
def test_zb_v_has_no_bubble_if_all_actions_take_the_same_time(p: int, extra: int) -> None:
    m = p + extra
    program = build(ZeroBubbleV(), num_ranks=p, num_microbatches=m)
    timeline = simulate(program)
    assert timeline.makespan == 6 * m + p - 1
    if m >= 2 * p - 1:
        assert timeline.waiting_between == (0,) * p
    assert max(verify(program).peak_activations) == min(2 * p, 2 * m)


@settings(max_examples=30)
@given(p=st.integers(1, 16), m=st.integers(1, 16))
def test_zb_v_holds_at_most_2p_pairs_with_few_microbatches(p: int, m: int) -> None:
    program = build(ZeroBubbleV(), num_ranks=p, num_microbatches=m)
    assert max(verify(program).peak_activations) <= 2 * min(p, m)
    assert simulate(program).makespan >= 6 * m + p - 1


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    "costs",
    [Costs(), Costs(transfer=0.25), Costs(transfer=0.5), Costs(1.0, 1.25, 0.75), Costs(1.0, 1.5, 0.5, 0.25)],
    ids=["equal", "transfer 0.25", "transfer 0.5", "long backward", "both"],
)
def test_zb_v_is_never_slower_than_torch_with_a_full_pipeline(p: int, costs: Costs) -> None:
    for m in (p, 2 * p - 1, 3 * p + 1):
        ours, theirs = (
            build(schedule, num_ranks=p, num_microbatches=m) for schedule in (ZeroBubbleV(), TorchZeroBubbleV())
        )
        assert simulate(ours, costs).makespan <= simulate(theirs, costs).makespan
        assert max(verify(ours).peak_activations) == max(verify(theirs).peak_activations)


@settings(max_examples=25)
@given(p=st.integers(1, 16), extra=st.integers(0, 32), overlap=st.sampled_from([1.0, 0.875, 0.75]))
def test_the_dualpipev_bubble_equals_the_formula_of_its_authors(p: int, extra: int, overlap: float) -> None:
    program = build(DualPipeV(), num_ranks=p, num_microbatches=2 * p + extra)
    timeline = simulate(program, Costs(overlap=overlap))
    forward, backward, weight = 1, 2, 1
    # The authors count the rank with most idle time. Ranks far from the last one overlap less and compute longer.
    expected = (p - 1) * (overlap * (forward + backward) + backward - 3 * weight)
    assert max(timeline.waiting) == pytest.approx(expected)
    if overlap == 1.0:
        assert timeline.waiting == (expected,) * p
    assert verify(program).peak_activations == (2 * p + 1,) * p if p > 1 else True


def test_dualpipev_overlaps_forwards_and_backwards() -> None:
    program = build(DualPipeV(), num_ranks=2, num_microbatches=6)
    assert str(program).splitlines()[1].startswith("rank 1: 1.F0 2.F0 1.F1 2.F1 1.F2 2.B0 2.F2+1.B0 1.F3+2.B1")
    assert sum(isinstance(action, Overlap) for action in program.computed(0)) == 7


def test_dualpipev_follows_the_eight_phases_of_the_original() -> None:
    first = str(build(DualPipeV(), num_ranks=2, num_microbatches=4)).splitlines()[0]
    filling, pairs = "0.F0 0.F1 0.F2 3.F0 3.I0 3.W0 3.F1", "0.F3+3.B1 3.F2+0.B0 3.B2 3.F3+0.B1"
    assert first == f"rank 0: {filling} {pairs} 3.B3 0.I2 0.W2 0.I3 0.W3"


def test_dualpipev_rejects_fewer_than_two_microbatches_per_rank() -> None:
    message = r"DualPipeV got 7 microbatches on 4 ranks; expected at least 8, two per rank\. Use more microbatches"
    with pytest.raises(UserError, match=message):
        build(DualPipeV(), num_ranks=4, num_microbatches=7)
