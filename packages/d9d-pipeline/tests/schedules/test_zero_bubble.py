from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_pipeline import Costs, Interleaved, ZeroBubble1P, build, simulate, verify


@settings(max_examples=25)
@given(p=st.integers(1, 16), extra=st.integers(0, 48), w=st.integers(1, 5), f=st.integers(0, 5), i=st.integers(0, 5))
def test_waits_for_f_plus_i_minus_w(p: int, extra: int, w: int, f: int, i: int) -> None:
    costs = Costs(w + f, w + i, w)  # as the paper assumes, gradients of weights take no longer than the others
    timeline = simulate(build(ZeroBubble1P(), num_ranks=p, num_microbatches=p + extra), costs)
    expected = (p - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
    assert timeline.waiting == (expected,) * p


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64))
def test_every_rank_holds_what_the_first_of_1f1b_does(p: int, m: int) -> None:
    peaks = verify(build(ZeroBubble1P(), num_ranks=p, num_microbatches=m)).peak_activations
    assert max(peaks) == min(p, m)
    if m >= p:
        assert peaks == (p,) * p


@settings(max_examples=15)
@given(p=st.integers(1, 16), rounds=st.integers(1, 3), v=st.integers(2, 3))
def test_interleaved_it_waits_as_little_and_holds_no_more_than_interleaved(p: int, rounds: int, v: int) -> None:
    m = rounds * p
    program, peer = (build(kind(v), num_ranks=p, num_microbatches=m) for kind in (ZeroBubble1P, Interleaved))
    assert simulate(program).waiting == (p - 1,) * p
    assert max(verify(program).peak_activations) <= max(verify(peer).peak_activations)


@settings(max_examples=15)
@given(p=st.integers(1, 16), m=st.integers(1, 40), v=st.integers(2, 3))
def test_interleaved_it_is_never_slower_than_interleaved(p: int, m: int, v: int) -> None:
    program, peer = (build(kind(v), num_ranks=p, num_microbatches=m) for kind in (ZeroBubble1P, Interleaved))
    assert simulate(program).makespan <= simulate(peer).makespan
