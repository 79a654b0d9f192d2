from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_pipeline import (
    Backward,
    BackwardWeight,
    DualPipeV,
    Forward,
    ForwardOnly,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    Program,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
    build,
)
from d9d_pipeline.actions import Action, Compute, ComputeLoss, ReceiveInput, SendOutput, parts


def computed(program: Program) -> list[list[tuple[str, int, int]]]:
    """Return each rank's computations as sorted (type, stage, microbatch) tuples."""
    every = [[part for action in actions for part in parts(action)] for actions in program.ranks]
    return [sorted((str(part)[0], part.stage, part.microbatch) for part in each) for each in every]


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(
        [GPipe(), OneForwardOneBackward(), Interleaved(2), ZeroBubble1P(), ZeroBubbleV(), DualPipeV()]
    ),
    p=st.integers(1, 6),
    m=st.integers(12, 20),
)
def test_each_microbatch_goes_forward_and_backward_once_on_each_stage(schedule: Schedule, p: int, m: int) -> None:
    program = build(schedule, num_ranks=p, num_microbatches=m)
    assert program.num_stages == p * schedule.stages_per_rank
    for rank, mine in enumerate(computed(program)):
        pairs = [(stage, microbatch) for stage in program.stages_of(rank) for microbatch in range(m)]
        assert [each[1:] for each in mine if each[0] == "F"] == pairs
        assert sorted(each[1:] for each in mine if each[0] in "BI") == pairs
        assert sorted(each[1:] for each in mine if each[0] in "BW") == pairs


def test_build_inserts_loss_and_transfers() -> None:
    program = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=2)
    as_text = [" ".join(map(str, actions)) for actions in program.ranks]
    assert as_text == ["F0 f0>1 F1 f1>1 b0<1 B0 b1<1 B1", "f0<0 F0 L0 f1<0 B0 b0>0 F1 L1 B1 b1>0"]
    local = build(ForwardOnly(2), num_ranks=1, num_microbatches=1)
    assert local.ranks == ((Forward(0, 0), Forward(1, 0), ComputeLoss(1, 0)),)


class Emitting(Schedule):
    """Yields given actions on one rank, and counts its calls."""

    def __init__(self, actions: Iterable[Any]) -> None:
        self.emitted = list(actions)
        self.asked = 0

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        self.asked += 1
        return self.emitted


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(0, 0)], r"lacks Forward\(stage=0, microbatch=1\)"),
        ([Forward(0, 0), Forward(0, 1), Backward(0, 0)], r"lacks Backward\(stage=0, microbatch=1\)"),
        (
            [Forward(0, 0), Forward(0, 0), Forward(0, 1)],
            r"has Forward\(stage=0, microbatch=0\), which is repeated",
        ),
        (
            [Forward(0, 0), Forward(0, 1), Forward(1, 0)],
            r"has Forward\(stage=1, microbatch=0\), but it only holds the stages .0.",
        ),
        ([Forward(0, 0), Forward(0, 1), Forward(0, 2)], r"expected stages up to 0 and microbatches up to 1"),
        (
            [Forward(0, 0), Backward(0, 1), Forward(0, 1), Backward(0, 0)],
            r"has Backward\(stage=0, microbatch=1\) before its forward",
        ),
        (
            [Forward(0, 0), ComputeLoss(0, 0)],
            r"has ComputeLoss\(stage=0, microbatch=0\), expected computations only: build adds the loss and",
        ),
        (["F0"], r"rank 0 has 'F0', expected computations only"),
        (
            [Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1), BackwardWeight(0, 1)],
            r"has BackwardWeight\(stage=0, microbatch=1\), which is repeated",
        ),
    ],
)
def test_rejects_invalid_actions(actions: list[Action], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Emitting(actions), num_ranks=1, num_microbatches=2)


def test_rejects_zero_microbatches() -> None:
    with pytest.raises(UserError, match=r"got 1 ranks and 0 microbatches; expected at least one of each"):
        build(GPipe(), num_ranks=1, num_microbatches=0)


def test_programs_of_equal_schedules_are_built_once() -> None:
    assert build(GPipe(), num_ranks=2, num_microbatches=3) is build(GPipe(), num_ranks=2, num_microbatches=3)
    assert build(Interleaved(2), num_ranks=2, num_microbatches=3) is not build(
        Interleaved(3), num_ranks=2, num_microbatches=3
    )


@dataclass
class Mutable(Schedule):
    """Compares by value, but is mutable."""

    backwards: bool = True

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        kinds: list[type[Forward | Backward]] = [Forward, Backward] if self.backwards else [Forward]
        return [kind(rank, microbatch) for microbatch in range(num_microbatches) for kind in kinds]


def test_mutable_schedules_are_not_cached() -> None:
    emitting = Emitting([Forward(0, 0)])
    for _ in range(2):
        build(emitting, num_ranks=1, num_microbatches=1)
    assert emitting.asked == 2
    mutable = Mutable()
    assert build(mutable, num_ranks=1, num_microbatches=1).trains
    mutable.backwards = False
    assert not build(mutable, num_ranks=1, num_microbatches=1).trains


@dataclass(frozen=True)
class WithList(Schedule):
    """Frozen, but unhashable because of its field."""

    microbatches: list[int]

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        return [Forward(rank, microbatch) for microbatch in self.microbatches]


def test_unhashable_schedules_are_built() -> None:
    program = build(WithList([1, 0]), num_ranks=2, num_microbatches=2)
    assert program.ranks[0] == (Forward(0, 1), SendOutput(0, 1, 1), Forward(0, 0), SendOutput(0, 0, 1))
    assert program.ranks[1][0] == ReceiveInput(1, 1, 0)
