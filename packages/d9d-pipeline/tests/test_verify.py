"""Compares the verifier with an independent interpreter that executes mutated programs on symbols."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    DualPipeV,
    Forward,
    ForwardOnly,
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
    verify,
)
from d9d_pipeline.actions import (
    Action,
    Compute,
    ComputeLoss,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    parts,
)

SCHEDULES: list[Schedule] = [
    ForwardOnly(),
    ForwardOnly(2),
    ForwardOnly(2, "v"),
    GPipe(),
    LoopedBreadthFirst(2),
    LoopedBreadthFirst(3),
    OneForwardOneBackward(),
    Interleaved(2),
    Interleaved(4),
    ZeroBubble1P(),
    ZeroBubble1P(2),
    ZeroBubble1P(2, warmup="long"),
    ZeroBubbleV(),
    DualPipeV(),
]
SENDS = (SendOutput, SendInputGradient)
RECEIVES = (ReceiveInput, ReceiveOutputGradient)


def programs(*, ranks: int, microbatches: int) -> st.SearchStrategy[Program]:
    def build_one(schedule: Schedule, p: int, m: int) -> Program:
        return build(schedule, num_ranks=p, num_microbatches=max(m, 2 * p) if schedule == DualPipeV() else m)

    return st.builds(build_one, st.sampled_from(SCHEDULES), st.integers(1, ranks), st.integers(1, microbatches))


class Wrong(Exception):  # noqa: N818 - an outcome
    """Raised if an action uses a value that is not in memory."""


Key = tuple[int, int]


@dataclass
class Rank:
    """Values in a rank's memory; each is removed when it is used, like a buffer."""

    position: int = 0
    inputs: dict[Key, Any] = field(default_factory=dict)
    outputs: dict[Key, Any] = field(default_factory=dict)
    saved: dict[Key, Any] = field(default_factory=dict)
    gradients: dict[Key, Any] = field(default_factory=dict)  # output gradients
    input_gradients: dict[Key, Any] = field(default_factory=dict)
    for_weights: dict[Key, Any] = field(default_factory=dict)
    weight_gradients: Counter[Any] = field(default_factory=Counter)
    losses: Counter[Any] = field(default_factory=Counter)


class Interpreter:
    """Executes a program on symbols. A transfer copies the sender's next value to the receiver, without checks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.trains = any(
            not isinstance(a, Forward | ComputeLoss | SendOutput | ReceiveInput) for r in program.ranks for a in r
        )
        self.last = len(program.stage_ranks) - 1
        self.ranks = [Rank() for _ in program.ranks]
        self.symbols: dict[Any, int] = {}
        for microbatch in range(program.num_microbatches):
            self.ranks[program.stage_ranks[0]].inputs[0, microbatch] = self.symbol("data", microbatch)

    def symbol(self, *what: Any) -> int:
        """Return the same number for equal arguments, so that comparing is cheap."""
        return self.symbols.setdefault(what, len(self.symbols))

    def is_right(self) -> bool:
        """Return True if all ranks finish with correct losses and gradients."""
        try:
            while self.sweep():
                pass
        except (Wrong, KeyError):
            return False
        ended = all(r.position == len(a) for r, a in zip(self.ranks, self.program.ranks, strict=True))
        weights = sum((rank.weight_gradients for rank in self.ranks), Counter())
        losses = sum((rank.losses for rank in self.ranks), Counter())
        return ended and (losses, weights) == self.expected()

    def expected(self) -> tuple[Counter[Any], Counter[Any]]:
        losses: Counter[Any] = Counter()
        weights: Counter[Any] = Counter()
        for microbatch in range(self.program.num_microbatches):
            values = [self.symbol("data", microbatch)]
            for stage in range(self.last + 1):
                values.append(self.symbol("output", stage, microbatch, values[-1]))
            losses[microbatch, values[-1]] += 1
            gradient = self.symbol("gradient of loss", microbatch, values[-1])
            for stage in reversed(range(self.last + 1) if self.trains else []):
                weights[stage, values[stage], gradient] += 1
                gradient = self.symbol("input gradient", stage, values[stage], gradient)
        return losses, weights

    def sweep(self) -> bool:
        """Run one action on each rank that can. Return True if any rank could."""
        moved = False
        for index, rank in enumerate(self.ranks):
            action = self.now(index)
            if action is None or isinstance(action, RECEIVES):
                continue
            if isinstance(action, SENDS):
                other = self.now(action.peer) if 0 <= action.peer < len(self.ranks) else None
                if not isinstance(other, RECEIVES) or other.peer != index or action.peer == index:
                    continue
                sent = rank.outputs if isinstance(action, SendOutput) else rank.input_gradients
                peer = self.ranks[action.peer]
                received = peer.inputs if isinstance(other, ReceiveInput) else peer.gradients
                received[other.stage, other.microbatch] = sent.pop((action.stage, action.microbatch))
                peer.position += 1
            else:
                self.compute(index, action)
            rank.position += 1
            moved = True
        return moved

    def now(self, rank: int) -> Action | None:
        actions, position = self.program.ranks[rank], self.ranks[rank].position
        return actions[position] if position < len(actions) else None

    def compute(self, index: int, action: Action) -> None:
        together = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
        for finish in [self.begin(index, part) for part in together]:
            finish()

    def begin(self, index: int, action: Action) -> Callable[[], None]:
        """Take the inputs of an action, and return a function that stores its result."""
        assert not isinstance(action, Overlap)
        key, rank = (action.stage, action.microbatch), self.ranks[index]
        if not 0 <= action.stage <= self.last or self.program.stage_ranks[action.stage] != index:
            raise Wrong
        match action:
            case Forward():
                value = rank.inputs.pop(key)
                return lambda: self.forward(index, key, value)
            case ComputeLoss():
                output = rank.outputs.pop(key)
                return lambda: self.loss(rank, key, output)
            case Backward() | BackwardInput():
                both = rank.saved.pop(key), rank.gradients.pop(key)
                if isinstance(action, Backward):
                    rank.weight_gradients[(key[0], *both)] += 1
                else:
                    rank.for_weights[key] = both
                return lambda: self.backward(index, key, *both)
            case BackwardWeight():
                rank.weight_gradients[(key[0], *rank.for_weights.pop(key))] += 1
                return lambda: None
        raise Wrong

    def forward(self, index: int, key: Key, value: Any) -> None:
        rank, (stage, microbatch) = self.ranks[index], key
        rank.saved[key] = value
        output = self.symbol(
            "output", stage, microbatch, value
        )  # masks and labels depend on the microbatch index of the action
        if stage < self.last and self.program.stage_ranks[stage + 1] == index:
            rank.inputs[stage + 1, microbatch] = output
        else:
            rank.outputs[key] = output

    def loss(self, rank: Rank, key: Key, output: Any) -> None:
        rank.losses[key[1], output] += 1
        rank.gradients[key] = self.symbol("gradient of loss", key[1], output)

    def backward(self, index: int, key: Key, value: Any, gradient: Any) -> None:
        rank, (stage, microbatch) = self.ranks[index], key
        result = self.symbol("input gradient", stage, value, gradient)
        if stage > 0 and self.program.stage_ranks[stage - 1] == index:
            rank.gradients[stage - 1, microbatch] = result
        else:
            rank.input_gradients[key] = result


Ranks = list[list[Action]]
KINDS = (Forward, Backward, BackwardInput, BackwardWeight, ComputeLoss)


def drop(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    del ranks[at[0]][at[1]]


def duplicate(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    actions = ranks[at[0]]
    actions.insert(chance.randrange(len(actions) + 1), actions[at[1]])


def swap(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    actions, index = ranks[at[0]], at[1]
    other = (index + chance.choice([1, 1, 2, chance.randrange(len(actions))])) % len(actions)
    actions[index], actions[other] = actions[other], actions[index]


def to_another_rank(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    action = ranks[at[0]].pop(at[1])
    target = chance.choice(ranks)
    target.insert(chance.randrange(len(target) + 1), action)


def retarget(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    action = ranks[at[0]][at[1]]
    if isinstance(action, Overlap):
        changed: Action = chance.choice([action.forward, action.backward, replace(action, forward=Forward(0, 0))])
    elif isinstance(action, (*SENDS, *RECEIVES)):
        name = chance.choice(["stage", "microbatch", "peer"])
        values = {"stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}
        values[name] += chance.choice([-1, 1])
        changed = chance.choice([type(action), type(action), *SENDS, *RECEIVES])(**values)
    else:
        stage, microbatch = action.stage, action.microbatch
        kind = chance.choice([type(action), *KINDS])
        changed = kind(stage + chance.choice([0, 0, -1, 1]), microbatch + chance.choice([0, 0, -1, 1]))
    ranks[at[0]][at[1]] = changed


def without_transfer(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    """Remove both sides of a transfer."""
    action = ranks[at[0]][at[1]]
    del ranks[at[0]][at[1]]
    pairs = {SendOutput: (ReceiveInput, 1), SendInputGradient: (ReceiveOutputGradient, -1)}
    if isinstance(action, SENDS):
        kind, towards = pairs[type(action)]
        other = kind(action.stage + towards, action.microbatch, at[0])
        for actions in ranks:
            actions[:] = [each for each in actions if each != other]


def crossed(ranks: Ranks, at: tuple[int, int], chance: random.Random) -> None:
    """Swap two transfers of one rank, or the values that they carry."""
    mine = [index for index, action in enumerate(ranks[at[0]]) if isinstance(action, (*SENDS, *RECEIVES))]
    if len(mine) > 1:
        first = chance.randrange(len(mine) - 1)
        one, two = mine[first], mine[first + 1]
        actions = ranks[at[0]]
        actions[one], actions[two] = actions[two], actions[one]


MUTATIONS = [drop, duplicate, swap, to_another_rank, retarget, without_transfer, crossed]


def mutate(program: Program, chance: random.Random) -> Program:
    ranks: Ranks = [list(actions) for actions in program.ranks]
    for _ in range(chance.choice([1, 1, 1, 2])):
        rank = chance.choice([index for index, actions in enumerate(ranks) if actions] or [0])
        if ranks[rank]:
            chance.choice(MUTATIONS)(ranks, (rank, chance.randrange(len(ranks[rank]))), chance)
    return replace(program, ranks=tuple(map(tuple, ranks)))


def is_accepted(program: Program) -> bool:
    try:
        verify(program)
    except ProgramError:
        return False
    return True


@settings(max_examples=150)
@given(program=programs(ranks=4, microbatches=8), seed=st.integers(0, 2**32))
def test_a_mutated_program_is_accepted_if_and_only_if_its_gradients_are_correct(program: Program, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    assert Interpreter(program).is_right()
    for _ in range(12):
        mutant = mutate(program, chance)
        assert is_accepted(mutant) == Interpreter(mutant).is_right()


def test_mutated_programs_include_accepted_and_refused_ones() -> None:
    chance = random.Random(0)  # noqa: S311 - not for secrets
    program = build(Interleaved(2), num_ranks=3, num_microbatches=4)
    accepted = Counter(is_accepted(mutate(program, chance)) for _ in range(150))
    assert accepted[True] > 5
    assert accepted[False] > 50


@settings(max_examples=25)
@given(program=programs(ranks=16, microbatches=64))
def test_every_schedule_computes_correct_gradients(program: Program) -> None:
    assert Interpreter(program).is_right()


@settings(max_examples=40)
@given(program=programs(ranks=16, microbatches=64))
def test_peak_is_the_number_of_held_activations(program: Program) -> None:
    peaks = []
    for rank in range(len(program.ranks)):
        held = peak = 0
        for action in program.computed(rank):
            held += isinstance(action, Forward | Overlap)
            peak = max(peak, held)
            held -= isinstance(action, Backward | BackwardWeight)
            held -= isinstance(action, Overlap) and isinstance(action.backward, Backward)
        peaks.append(peak if program.trains else 0)
    assert verify(program).peak_activations == tuple(peaks)


def two_ranks(first: list[Action], second: list[Action], num_microbatches: int = 1) -> Program:
    return Program((tuple(first), tuple(second)), (0, 1), num_microbatches)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            two_ranks([Forward(0, 0), SendOutput(0, 0, 1)], [Forward(1, 0), ReceiveInput(1, 0, 0), ComputeLoss(1, 0)]),
            "rank 1 has Forward(stage=1, microbatch=0) before its input is available: ReceiveInput(",
        ),
        (
            two_ranks([SendOutput(0, 0, 1), Forward(0, 0)], [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0)]),
            "rank 0 has SendOutput(stage=0, microbatch=0, peer=1) before its forward",
        ),
        (
            two_ranks([Forward(0, 0)], [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0)]),
            "rank 0 lacks SendOutput(stage=0, microbatch=0, peer=1)",
        ),
        (
            two_ranks(
                [Forward(0, 0), SendOutput(0, 0, 1), ReceiveOutputGradient(0, 0, 1)],
                [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0), SendInputGradient(1, 0, 0)],
            ),
            "rank 1 lacks Backward(stage=1, microbatch=0)",
        ),
        (
            two_ranks([Forward(0, 0), SendOutput(0, 0, 1)], [ReceiveInput(1, 0, 0), Forward(1, 0)]),
            "rank 1 lacks ComputeLoss(stage=1, microbatch=0)",
        ),
        (
            two_ranks([Forward(0, 0), SendOutput(0, 0, 0)], [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0)]),
            "rank 0 has SendOutput(stage=0, microbatch=0, peer=0), but stage 1 is on rank 1",
        ),
        (
            two_ranks([Forward(0, 0), ComputeLoss(0, 0)], [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0)]),
            "rank 0 has ComputeLoss(stage=0, microbatch=0), but only stage 1 has a loss",
        ),
        (
            two_ranks(
                [ReceiveInput(0, 0, 1), Forward(0, 0)], [ReceiveInput(1, 0, 0), Forward(1, 0), ComputeLoss(1, 0)]
            ),
            "rank 0 has ReceiveInput(stage=0, microbatch=0, peer=1), but there is no stage -1",
        ),
        (
            two_ranks([Forward(0, 1)], [Forward(0, 0), Forward(1, 0)]),
            "rank 0 lacks Forward(stage=0, microbatch=0)",
        ),
        (
            Program(((Forward(0, 0), Forward(1, 0), ComputeLoss(1, 0)),), (0, 0), 0),
            "the program has 2 stages and 0 microbatches; expected at least one of each",
        ),
        (
            Program(((Forward(0, 0), Forward(1, 0), ComputeLoss(1, 0)),), (0, 2), 1),
            "stage 1 is on rank 2; expected one of the ranks 0 to 0",
        ),
        (
            Program(((Forward(0, 0), Forward(1, 0), ComputeLoss(1, 0), Forward(1, 0)),), (0, 0), 1),
            "rank 0 has Forward(stage=1, microbatch=0), which is repeated",
        ),
        (
            Program(((Forward(0, 0), SendOutput(0, 0, 0), Forward(1, 0), ComputeLoss(1, 0)),), (0, 0), 1),
            "rank 0 has SendOutput(stage=0, microbatch=0, peer=0), but stage 1 is on the same rank",
        ),
        (
            Program(((Forward(0, 0), ComputeLoss(0, 0), Forward(0, 1)),), (0,), 1),
            "rank 0 has Forward(stage=0, microbatch=1), expected stages up to 0 and microbatches up to 0",
        ),
    ],
)
def test_the_error_describes_the_problem_of_an_invalid_program(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        verify(program)


def test_error_names_all_transfers_of_a_deadlock() -> None:
    first: list[Action] = [Forward(0, 0), SendOutput(0, 0, 1), Forward(0, 1), SendOutput(0, 1, 1)]
    second: list[Action] = [ReceiveInput(1, 1, 0), ReceiveInput(1, 0, 0)]
    for microbatch in range(2):
        second += [Forward(1, microbatch), ComputeLoss(1, microbatch)]
    with pytest.raises(ProgramError) as error:
        verify(two_ranks(first, second, num_microbatches=2))
    assert str(error.value).splitlines()[1:] == [
        "  rank 1 has ReceiveInput(stage=1, microbatch=1, peer=0) before ReceiveInput(stage=1, microbatch=0, peer=0), "
        "and rank 0 has SendOutput(stage=0, microbatch=0, peer=1) before SendOutput(stage=0, microbatch=1, peer=1): "
        "these ranks wait for each other forever"
    ]


def test_error_omits_ranks_that_only_wait_for_a_deadlock() -> None:
    program = build(OneForwardOneBackward(), num_ranks=4, num_microbatches=8)
    ranks = [list(actions) for actions in program.ranks]
    send, receive = SendOutput(2, 2, 3), ReceiveOutputGradient(2, 1, 3)
    first, second = sorted(map(ranks[2].index, (send, receive)))
    ranks[2][first], ranks[2][second] = ranks[2][second], ranks[2][first]
    with pytest.raises(ProgramError) as error:
        verify(replace(program, ranks=tuple(map(tuple, ranks))))
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith(f"  rank 2 has {send!r} before {receive!r}, and rank 3 has SendInputGradient(stage=3, ")


@settings(max_examples=60)
@given(program=programs(ranks=4, microbatches=8), seed=st.integers(0, 2**32))
def test_the_first_line_names_the_mutated_rank_and_action(program: Program, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    for _ in range(8):
        ranks: Ranks = [list(actions) for actions in program.ranks]
        rank = chance.randrange(len(ranks))
        actions = ranks[rank]
        index, other = chance.randrange(len(actions)), chance.randrange(len(actions))
        changed = [actions[index]]
        match chance.choice(["drop", "duplicate", "swap neighbors", "swap"]):
            case "drop":
                del actions[index]
            case "duplicate":
                actions.insert(other, actions[index])
            case kind:
                other = (index + 1) % len(actions) if kind == "swap neighbors" else other
                changed.append(actions[other])
                actions[index], actions[other] = actions[other], actions[index]
        try:
            verify(replace(program, ranks=tuple(map(tuple, ranks))))
        except ProgramError as error:
            line = str(error).splitlines()[1]
            names = [repr(part) for action in changed for part in (action, *parts(action))]
            assert re.search(rf"\brank {rank} (has|lacks) ", line), (line, changed)
            assert any(name in line for name in names), (line, changed)


def test_rejects_an_overlap_of_a_forward_with_its_own_backward() -> None:
    overlap = Overlap(Forward(0, 0), Backward(0, 0))
    with pytest.raises(ProgramError, match=r"rank 0 has Overlap\(.*\) before its forward, or the gradient"):
        verify(Program(((overlap, ComputeLoss(0, 0)),), (0,), 1))


def test_rejects_nested_overlaps() -> None:
    inner: Any = Overlap(Forward(0, 0), Backward(0, 0))
    with pytest.raises(ProgramError, match=r"rank 0 has Overlap\(.*\), which is not an action"):
        verify(Program(((Forward(0, 0), ComputeLoss(0, 0), Overlap(inner, Backward(0, 0))),), (0,), 1))


def test_a_long_list_of_problems_is_truncated() -> None:
    with pytest.raises(ProgramError, match=r"and 10 more$"):
        verify(Program(((),), (0,), 30))


def test_rejects_a_program_above_max_activations() -> None:
    program = build(GPipe(), num_ranks=2, num_microbatches=6)
    assert verify(program, max_activations=6).peak_activations == (6, 6)
    message = (
        r"rank 0 holds the activations of 6 \(stage, microbatch\) pairs at a time; expected at most max_activations = 5"
    )
    with pytest.raises(ProgramError, match=message):
        verify(program, max_activations=5)
    assert verify(build(ForwardOnly(), num_ranks=2, num_microbatches=6), max_activations=1).peak_activations == (0, 0)


class Bounded(Schedule):
    """GPipe with `max_activations`."""

    max_activations = 4

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Compute]:
        return GPipe().actions(rank, num_ranks, num_microbatches)


def test_build_verifies_the_bound_of_a_schedule() -> None:
    assert build(Bounded(), num_ranks=2, num_microbatches=4).num_microbatches == 4
    with pytest.raises(
        ProgramError, match=r"expected at most max_activations = 4\. Increase max_activations, or use a schedule"
    ):
        build(Bounded(), num_ranks=2, num_microbatches=5)


def test_program_error_is_a_user_error() -> None:
    assert issubclass(ProgramError, UserError)


class Forgetful(Schedule):
    """1F1B without one of its backwards."""

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Compute]:
        actions = OneForwardOneBackward().actions(rank, num_ranks, num_microbatches)
        return [action for action in actions if action != Backward(1, 2)]


def test_error_names_the_missing_backward_of_a_schedule() -> None:
    with pytest.raises(ProgramError) as error:
        build(Forgetful(), num_ranks=3, num_microbatches=4)
    assert str(error.value).splitlines()[1:] == ["  rank 1 lacks Backward(stage=1, microbatch=2)"]
    assert "Change the actions of these ranks" in str(error.value)
