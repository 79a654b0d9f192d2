import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_pipeline import (
    Backward,
    BackwardWeight,
    Costs,
    DualPipeV,
    Forward,
    GPipe,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Overlap,
    Program,
    ProgramError,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
    simulate,
)
from d9d_pipeline.actions import Compute, SendInputGradient, SendOutput

SCHEDULES: list[Schedule] = [
    GPipe(),
    LoopedBreadthFirst(2),
    OneForwardOneBackward(),
    Interleaved(2),
    ZeroBubble1P(2),
    ZeroBubbleV(),
    DualPipeV(),
]


def relaxed_ends(program: Program, costs: Costs) -> dict[tuple[str, int, int], float]:
    """Return the end of each computation: its longest path, relaxed over all actions until no end changes."""
    ends: dict[tuple[str, int, int], float] = {}
    last = program.num_stages - 1

    def names(action: Compute) -> list[tuple[str, int, int]]:
        pair = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
        return [(str(part)[0].replace("I", "B"), part.stage, part.microbatch) for part in pair]

    def before(name: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        kind, stage, microbatch = name
        if kind == "F":
            return [("F", stage - 1, microbatch)] if stage > 0 else []
        if kind == "W":
            return [("B", stage, microbatch)]
        return [("F", stage, microbatch)] + ([("B", stage + 1, microbatch)] if stage < last else [])

    moved = True
    while moved:
        moved = False
        for rank in range(len(program.ranks)):
            clock = 0.0
            for action in program.computed(rank):
                start = clock
                for needed in [need for name in names(action) for need in before(name)]:
                    away = program.stage_ranks[needed[1]] != rank
                    start = max(start, ends.get(needed, 0.0) + (costs.transfer if away else 0.0))
                clock = start + costs.of(action)
                for name in names(action):
                    moved |= ends.get(name) != clock
                    ends[name] = clock
    return ends


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(SCHEDULES),
    p=st.integers(1, 5),
    m=st.integers(1, 10),
    costs=st.builds(Costs, *[st.integers(0, 9)] * 4, st.sampled_from([1.0, 0.5])),
)
def test_every_action_ends_with_its_longest_dependency_chain(schedule: Schedule, p: int, m: int, costs: Costs) -> None:
    program = build(schedule, num_ranks=p, num_microbatches=max(m, 2 * p) if schedule == DualPipeV() else m)
    expected = relaxed_ends(program, costs)
    timeline = simulate(program, costs)
    assert timeline.makespan == max(expected.values())
    for rank in range(p):
        for timed in timeline.computed(rank):
            part = timed.action.backward if isinstance(timed.action, Overlap) else timed.action
            assert not isinstance(part, SendOutput)
            name = str(part)[0].replace("I", "B")
            assert timed.end == expected[name, part.stage, part.microbatch]


def test_custom_durations_replace_the_costs() -> None:
    program = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=1)
    timeline = simulate(
        program, Costs(transfer=1.0), duration=lambda action: 3.0 if isinstance(action, Forward) else 5.0
    )
    assert timeline.makespan == 3 + 1 + 3 + 5 + 1 + 5


def test_transfers_that_take_time_are_in_the_timeline() -> None:
    program = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=1)
    assert all(not isinstance(each.action, SendOutput) for each in simulate(program).ranks[0])
    first, second = simulate(program, Costs(1.0, 2.0, 1.0, transfer=0.5)).ranks
    assert [(each.action, each.start, each.end) for each in first] == [
        (Forward(0, 0), 0.0, 1.0),
        (SendOutput(0, 0, 1), 1.0, 1.5),
        (Backward(0, 0), 6.0, 9.0),
    ]
    assert [(each.action, each.start, each.end) for each in second][-1] == (SendInputGradient(1, 0, 0), 5.5, 6.0)


def test_rejects_negative_costs() -> None:
    with pytest.raises(UserError, match=r"got Costs\(forward=nan.*\); expected costs of 0 or more"):
        Costs(forward=float("nan"))
    with pytest.raises(UserError, match=r"got Costs\(forward=-1.*\); expected costs of 0 or more"):
        Costs(forward=-1)


def test_rejects_an_invalid_program() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 lacks Forward\(stage=0, microbatch=0\)"):
        simulate(Program(((BackwardWeight(0, 0),),), (0,), 1))
