import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_pipeline import Costs, Interleaved, OneForwardOneBackward, build, simulate, verify

costs = st.builds(Costs, *[st.integers(1, 9)] * 3)


@settings(max_examples=30)
@given(p=st.integers(1, 16), m=st.integers(1, 64), costs=costs)
def test_1f1b_takes_as_long_as_gpipe_and_holds_p_minus_r_microbatches(p: int, m: int, costs: Costs) -> None:
    each = costs.forward + costs.backward_input + costs.backward_weight
    program = build(OneForwardOneBackward(), num_ranks=p, num_microbatches=m)
    assert simulate(program, costs).makespan == (m + p - 1) * each
    assert verify(program).peak_activations == tuple(min(p - rank, m) for rank in range(p))


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(2, 4), costs=costs)
def test_interleaved_bubble_is_p_minus_1_stage_times(p: int, m: int, v: int, costs: Costs) -> None:
    each = costs.forward + costs.backward_input + costs.backward_weight
    program = build(Interleaved(v), num_ranks=p, num_microbatches=m)
    makespan = simulate(program, costs).makespan
    if m >= p:  # a multiple of p or not
        assert makespan == (m * v + p - 1) * each
    else:
        assert makespan <= (p * v + p - 1) * each
    if m % p == 0:
        expected = tuple(min((v - 1) * p + 2 * (p - rank - 1) + 1, m * v) for rank in range(p))
        assert verify(program).peak_activations == expected


def test_interleaved_with_one_stage_is_1f1b() -> None:
    one = build(Interleaved(1), num_ranks=4, num_microbatches=8)
    assert one.ranks == build(OneForwardOneBackward(), num_ranks=4, num_microbatches=8).ranks


def test_rejects_zero_stages_per_rank() -> None:
    with pytest.raises(UserError, match=r"got stages_per_rank = 0; expected at least 1"):
        build(Interleaved(0), num_ranks=2, num_microbatches=2)


@settings(max_examples=10)
@given(p=st.integers(1, 5), m=st.integers(1, 12), v=st.integers(1, 3))
def test_a_larger_max_activations_is_respected_and_never_slower(p: int, m: int, v: int) -> None:
    longest = -(-m // max(1, m // p))  # number of microbatches in the longest round
    least, makespans = (v - 1) * longest + 1, []
    for bound in range(least, least + 2 * p):
        program = build(Interleaved(v, max_activations=bound), num_ranks=p, num_microbatches=m)
        assert max(verify(program, max_activations=bound).peak_activations) <= bound
        makespans.append(simulate(program).makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] == simulate(build(Interleaved(v), num_ranks=p, num_microbatches=m)).makespan
    with pytest.raises(
        UserError, match=rf"got max_activations = {least - 1} for {v} stages .* expected at least {least},"
    ):
        build(Interleaved(v, max_activations=least - 1), num_ranks=p, num_microbatches=m)


def test_1f1b_respects_max_activations() -> None:
    program = build(OneForwardOneBackward(max_activations=2), num_ranks=4, num_microbatches=8)
    assert verify(program).peak_activations == (2, 2, 2, 1)
    with pytest.raises(UserError, match=r"got max_activations = 0 for 1 stages on each of 4 ranks and 8 microbatches"):
        build(OneForwardOneBackward(max_activations=0), num_ranks=4, num_microbatches=8)
