from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_pipeline import Costs, ForwardOnly, GPipe, LoopedBreadthFirst, build, simulate, verify

costs = st.builds(Costs, *[st.integers(1, 9)] * 3)


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64), costs=costs)
def test_gpipe_idle_time_is_p_minus_1_microbatches(p: int, m: int, costs: Costs) -> None:
    each = costs.forward + costs.backward_input + costs.backward_weight
    program = build(GPipe(), num_ranks=p, num_microbatches=m)
    timeline = simulate(program, costs)
    assert timeline.makespan == (m + p - 1) * each
    assert timeline.waiting == ((p - 1) * each,) * p
    assert verify(program).peak_activations == (m,) * p


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(1, 4), costs=costs)
def test_breadth_first_bubble_is_p_minus_1_stage_times(p: int, m: int, v: int, costs: Costs) -> None:
    each = costs.forward + costs.backward_input + costs.backward_weight
    program = build(LoopedBreadthFirst(v), num_ranks=p, num_microbatches=m)
    timeline = simulate(program, costs)
    # With fewer microbatches than ranks, each stage of the loop takes as long as with p microbatches.
    assert timeline.makespan == (max(m, p) * (v - 1) + m + p - 1) * each
    assert verify(program).peak_activations == (m * v,) * p


@settings(max_examples=25)
@given(p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(1, 3), placement=st.sampled_from(["loop", "v"]))
def test_forward_only_holds_no_activations(p: int, m: int, v: int, placement: str) -> None:
    program = build(ForwardOnly(v, "v" if placement == "v" else "loop"), num_ranks=p, num_microbatches=m)
    assert not program.trains
    assert verify(program).peak_activations == (0,) * p
    assert sum(len(list(program.computed(rank))) for rank in range(p)) == p * m * v
    if placement == "loop":
        assert simulate(program).makespan == max(m, p) * (v - 1) + m + p - 1
