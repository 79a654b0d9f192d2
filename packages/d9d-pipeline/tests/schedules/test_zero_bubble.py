from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_schedules import TorchInterleavedZeroBubble

from d9d_dist import UserError
from d9d_pipeline import Costs, Interleaved, ZeroBubble1P, build, simulate, verify
from d9d_pipeline.schedules.one_forward_one_backward import Warmup


@settings(max_examples=25)
@given(p=st.integers(1, 16), extra=st.integers(0, 48), w=st.integers(1, 5), f=st.integers(0, 5), i=st.integers(0, 5))
def test_zero_bubble_idle_time_is_p_minus_1_times_f_plus_i_minus_w(p: int, extra: int, w: int, f: int, i: int) -> None:
    costs = Costs(w + f, w + i, w)  # as in the paper, weight gradients take no longer than the other actions
    timeline = simulate(build(ZeroBubble1P(), num_ranks=p, num_microbatches=p + extra), costs)
    expected = (p - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
    assert timeline.waiting == (expected,) * p


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64))
def test_every_rank_holds_as_many_activations_as_the_first_of_1f1b(p: int, m: int) -> None:
    peaks = verify(build(ZeroBubble1P(), num_ranks=p, num_microbatches=m)).peak_activations
    assert max(peaks) == min(p, m)
    if m >= p:
        assert peaks == (p,) * p


@settings(max_examples=15)
@given(p=st.integers(1, 16), rounds=st.integers(1, 3), v=st.integers(2, 3))
def test_interleaved_zb1p_is_as_fast_and_holds_no_more_than_interleaved(p: int, rounds: int, v: int) -> None:
    m = rounds * p
    program, peer = (build(kind(v), num_ranks=p, num_microbatches=m) for kind in (ZeroBubble1P, Interleaved))
    assert simulate(program).waiting == (p - 1,) * p
    assert max(verify(program).peak_activations) <= max(verify(peer).peak_activations)


@settings(max_examples=15)
@given(p=st.integers(1, 16), m=st.integers(1, 40), v=st.integers(2, 3), warmup=st.sampled_from(["short", "long"]))
def test_interleaved_zb1p_is_never_slower_than_interleaved(p: int, m: int, v: int, warmup: Warmup) -> None:
    schedules = ZeroBubble1P(v, warmup=warmup), Interleaved(v)
    program, peer = (build(schedule, num_ranks=p, num_microbatches=m) for schedule in schedules)
    assert simulate(program).makespan <= simulate(peer).makespan


@pytest.mark.parametrize(("p", "v"), list(product((2, 4, 8), (2, 3, 4))))
@pytest.mark.slow("8-3", "8-4")
def test_zero_bubble_is_as_fast_as_torch_with_equal_activations(p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        costs = Costs(1.0, 1.25, 0.75, transfer=0.25)
        ours, theirs = (
            build(schedule, num_ranks=p, num_microbatches=m)
            for schedule in (ZeroBubble1P(v), TorchInterleavedZeroBubble(v))
        )
        assert verify(ours).peak_activations == verify(theirs).peak_activations == (v * p,) * p
        assert simulate(ours, costs).makespan == simulate(theirs, costs).makespan
        longer = build(ZeroBubble1P(v, warmup="long"), num_ranks=p, num_microbatches=m)
        assert simulate(longer, costs).makespan <= simulate(theirs, costs).makespan
        assert max(verify(longer).peak_activations) == min((v + 1) * p - 1, v * m)


@settings(max_examples=10)
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 12),
    v=st.integers(1, 3),
    warmup=st.sampled_from(["short", "long"]),
    transfer=st.sampled_from([0.0, 0.25]),
)
def test_a_larger_max_activations_is_respected_and_never_slower(
    p: int, m: int, v: int, warmup: Warmup, transfer: float
) -> None:
    longest = -(-m // max(1, m // p))  # number of microbatches in the longest round
    least, costs = (v - 1) * longest + 1, Costs(transfer=transfer)
    makespans = []
    for bound in range(least, least + 2 * p):
        schedule = ZeroBubble1P(v, warmup=warmup, max_activations=bound)
        program = build(schedule, num_ranks=p, num_microbatches=m)
        assert max(verify(program, max_activations=bound).peak_activations) <= bound
        makespans.append(simulate(program, costs).makespan)
    assert makespans == sorted(makespans, reverse=True)
    free = build(ZeroBubble1P(v, warmup=warmup), num_ranks=p, num_microbatches=m)
    assert makespans[-1] == simulate(free, costs).makespan
    with pytest.raises(
        UserError, match=rf"got max_activations = {least - 1} for {v} stages .* expected at least {least},"
    ):
        build(ZeroBubble1P(v, max_activations=least - 1), num_ranks=p, num_microbatches=m)
