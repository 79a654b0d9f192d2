"""The proof that a program computes everything once, in a possible order, and that no two ranks wait for each other.

Nothing is taken over from how a program is built: a program from anywhere, changed by hand, is judged by what it says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

from d9d_dist import UserError
from d9d_pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Loss,
    Overlap,
    Part,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    Transfer,
    parts,
)

if TYPE_CHECKING:
    from d9d_pipeline.program import Program

_MAX_PROBLEMS = 20  # that are listed

# What is true of a microbatch on a stage, on the rank of the stage.
_HAS_INPUT, _RAN, _GAVE_LOSS, _SENT_OUTPUT = 1, 2, 4, 8
_HAS_GRADIENT, _RAN_BACK, _HAS_WEIGHTS, _SENT_GRADIENT = 16, 32, 64, 128


class ProgramError(UserError):
    """A program that would hang, or compute something else than every microbatch through every stage."""


@final
@dataclass(frozen=True, slots=True)
class Verified:
    """What is known of a program that is right.

    Attributes:
        peak_activations: For each rank the largest number of (stage, microbatch) pairs whose activations it holds at a
            time, from forward until the gradients of the weights are there. Zeros if nothing goes backward.
    """

    peak_activations: tuple[int, ...]


def verify(program: "Program") -> Verified:
    """Prove that a program is right.

    - Every microbatch goes forward once through every stage and into the loss, and, if anything goes backward, backward
      once: whole, or first for the inputs and then for the weights. Each on the rank that holds the stage.
    - What an action needs was computed before on its rank, or received.
    - Every output and gradient that another rank needs is sent once, and received there once.
    - Were every transfer to block both its ranks until it is done, all ranks would still come to their end.

    Args:
        program: From anywhere.

    Raises:
        ProgramError: Listing what is wrong.
    """
    refuse(_shape_problems(program))
    play = _Play(program)
    refuse(play.problems())
    return Verified(tuple(play.peaks) if program.trains else (0,) * len(program.ranks))


def refuse(problems: list[str]) -> None:
    """Raise a `ProgramError` that lists the problems, if there are any."""
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        lines = problems[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise ProgramError(
            "the program would hang or compute something else; expected every microbatch once forward through every "
            "stage, and once backward if it trains, each on the rank of the stage and after what it needs. Change what "
            "these ranks do:\n" + "\n".join(f"  {line}" for line in lines)
        )


def _shape_problems(program: "Program") -> list[str]:
    """What is wrong before any action is looked at."""
    num_ranks = len(program.ranks)
    problems = [
        f"stage {stage} is on rank {rank}; expected one of the ranks 0 to {num_ranks - 1}"
        for stage, rank in enumerate(program.stage_ranks)
        if not 0 <= rank < num_ranks
    ]
    if not program.stage_ranks or program.num_microbatches < 1:
        problems.append(
            f"it has {program.num_stages} stages and {program.num_microbatches} microbatches; expected at least one of "
            "each"
        )
    for rank, actions in enumerate(program.ranks):
        strange = [action for action in actions if type(action) not in _RULES and not _is_overlap(action)]
        problems += [f"rank {rank} has {action!r}, which is no action" for action in strange]
    return problems


def _is_overlap(action: Any) -> bool:
    return (
        isinstance(action, Overlap)
        and isinstance(action.forward, Forward)
        and isinstance(action.backward, Backward | BackwardInput)
    )


_Single: TypeAlias = Part | Loss | Transfer
"""What is done on its own, or as a part of an overlap."""


@final
@dataclass(frozen=True, slots=True)
class _Rule:
    """What an action means to its (stage, microbatch).

    Attributes:
        needs: Facts that have to be true before.
        makes: Facts that it makes true, and that must not be true before.
        lacks: What is missing if not all of `needs` are true.
        towards: The neighbour to which something goes or from which it comes: 1 is the next stage, -1 the one before.
        hands: The fact that it makes true for that neighbour if it is on the same rank.
        holds: How many more activations are held afterwards.
        counterpart: For a transfer, what the peer does.
    """

    needs: int
    makes: int
    lacks: str = ""
    towards: int = 0
    hands: int = 0
    holds: int = 0
    counterpart: type[Transfer] | None = None


_RULES: dict[type[Any], _Rule] = {
    Forward: _Rule(_HAS_INPUT, _RAN, "its input is there", towards=1, hands=_HAS_INPUT, holds=1),
    Loss: _Rule(_RAN, _GAVE_LOSS | _HAS_GRADIENT, "its forward"),
    Backward: _Rule(
        _RAN | _HAS_GRADIENT,
        _RAN_BACK | _HAS_WEIGHTS,
        "its forward, or the gradient of its output is there",
        towards=-1,
        hands=_HAS_GRADIENT,
        holds=-1,
    ),
    BackwardInput: _Rule(
        _RAN | _HAS_GRADIENT,
        _RAN_BACK,
        "its forward, or the gradient of its output is there",
        towards=-1,
        hands=_HAS_GRADIENT,
    ),
    BackwardWeight: _Rule(_RAN_BACK, _HAS_WEIGHTS, "its backward for the inputs", holds=-1),
    SendOutput: _Rule(_RAN, _SENT_OUTPUT, "its forward", towards=1, counterpart=ReceiveInput),
    ReceiveInput: _Rule(0, _HAS_INPUT, towards=-1, counterpart=SendOutput),
    SendInputGradient: _Rule(_RAN_BACK, _SENT_GRADIENT, "its backward", towards=-1, counterpart=ReceiveOutputGradient),
    ReceiveOutputGradient: _Rule(0, _HAS_GRADIENT, towards=1, counterpart=SendInputGradient),
}

_TRANSFERS = (SendOutput, ReceiveInput, SendInputGradient, ReceiveOutputGradient)

_Place: TypeAlias = tuple[int, int | None]
"""The rank that does something, and the one with which it does so."""


def _places(stage_ranks: tuple[int, ...]) -> dict[tuple[type[Any], int], _Place]:
    """Where each kind of action has its place, by stage. What is not there, no rank may do."""
    places: dict[tuple[type[Any], int], _Place] = {}
    last = len(stage_ranks) - 1
    for stage, rank in enumerate(stage_ranks):
        for kind, rule in _RULES.items():
            neighbour = stage + rule.towards
            if rule.counterpart is None:
                if kind is not Loss or stage == last:
                    places[kind, stage] = rank, None
            elif 0 <= neighbour <= last and stage_ranks[neighbour] != rank:
                places[kind, stage] = rank, stage_ranks[neighbour]
    return places


class _Play:
    """Plays a program, every transfer blocking both of its ranks until both are there."""

    def __init__(self, program: "Program") -> None:
        self._ranks = program.ranks
        self._stage_ranks = program.stage_ranks
        self._last = program.num_stages - 1
        self._num_microbatches = program.num_microbatches
        self._trains = program.trains
        self._places = _places(program.stage_ranks)
        self._positions = [0] * len(program.ranks)
        self._facts = [0] * (program.num_stages * program.num_microbatches)
        self._facts[: self._num_microbatches] = [_HAS_INPUT] * self._num_microbatches
        self._waits: list[Transfer | None] = [None] * len(program.ranks)
        self._held = [0] * len(program.ranks)
        self.peaks = [0] * len(program.ranks)

    def problems(self) -> list[str]:
        """What is wrong: impossible actions, or else ranks that wait for ever; and what nobody does."""
        impossible: list[str] = []
        awake = list(range(len(self._ranks)))
        while awake:
            rank = awake.pop()
            actions = self._ranks[rank]
            while self._positions[rank] < len(actions):
                action = actions[self._positions[rank]]
                if isinstance(action, Overlap):
                    problem = self._problem(rank, action.forward) or self._problem(rank, action.backward)
                else:
                    problem = self._problem(rank, action)
                if problem is not None:
                    impossible.append(f"rank {rank} has {action!r}{problem}")
                    break
                if isinstance(action, Overlap):
                    self._note(rank, action.forward)
                    self._note(rank, action.backward)
                else:
                    if isinstance(action, _TRANSFERS):
                        other = self._waits[action.peer]
                        if other is None or not _match(action, other):
                            self._waits[rank] = action
                            break
                        self._waits[action.peer] = None
                        self._note(action.peer, other)
                        self._positions[action.peer] += 1
                        awake.append(action.peer)
                    self._note(rank, action)
                self._positions[rank] += 1
        # What is nowhere in the program comes first: the rest may follow from it.
        return list(self._forgotten()) or impossible or [*self._stuck(), *self._unsent()]

    def _problem(self, rank: int, action: _Single) -> str | None:
        """Why an action is impossible now, whatever other ranks do."""
        rule = _RULES[type(action)]
        peer = action.peer if isinstance(action, _TRANSFERS) else None
        stage, microbatch = action.stage, action.microbatch
        if self._places.get((type(action), stage)) != (rank, peer) or not 0 <= microbatch < self._num_microbatches:
            return self._misplaced(rank, action, stage + rule.towards)
        facts = self._facts[stage * self._num_microbatches + microbatch]
        if facts & rule.makes:
            return ", which was done before"
        return None if facts & rule.needs == rule.needs else f" before {rule.lacks}"

    def _misplaced(self, rank: int, action: _Single, neighbour: int) -> str:
        """Why an action has its place elsewhere, or nowhere."""
        if not (0 <= action.stage <= self._last and 0 <= action.microbatch < self._num_microbatches):
            return f", expected stages up to {self._last} and microbatches up to {self._num_microbatches - 1}"
        if self._stage_ranks[action.stage] != rank:
            return f", not its own: stage {action.stage} is on rank {self._stage_ranks[action.stage]}"
        if isinstance(action, Loss):
            return f", but only stage {self._last} has a loss"
        if not 0 <= neighbour <= self._last:
            return f", but there is no stage {neighbour}"
        holder = self._stage_ranks[neighbour]
        return f", but stage {neighbour} is on " + ("the same rank" if holder == rank else f"rank {holder}")

    def _note(self, rank: int, action: _Single) -> None:
        """Remember what is true after an action."""
        rule = _RULES[type(action)]
        cell = action.stage * self._num_microbatches + action.microbatch
        self._facts[cell] |= rule.makes
        if rule.hands:
            neighbour = action.stage + rule.towards
            if 0 <= neighbour <= self._last and self._stage_ranks[neighbour] == rank:
                self._facts[cell + rule.towards * self._num_microbatches] |= rule.hands
        if rule.holds:
            self._held[rank] += rule.holds
            self.peaks[rank] = max(self.peaks[rank], self._held[rank])

    def _stuck(self) -> Iterator[str]:
        for rank, action in enumerate(self._waits):
            if action is not None:
                actions, position = self._ranks[action.peer], self._positions[action.peer]
                where = f"is at {actions[position]!r}" if position < len(actions) else "has come to its end"
                yield f"rank {rank} waits for ever in {action!r}: rank {action.peer} {where}"

    def _forgotten(self) -> Iterator[str]:
        """What should be computed and is not to be found on the rank of its stage."""
        emitted = self._facts
        if any(position < len(actions) for position, actions in zip(self._positions, self._ranks, strict=True)):
            emitted = self._emitted()
        wanted = _RAN | _RAN_BACK | _HAS_WEIGHTS if self._trains else _RAN
        for index, facts in enumerate(emitted):
            missing = wanted & ~facts
            if not missing:
                continue
            name = "Forward" if missing & _RAN else "Backward" if missing & _RAN_BACK else "BackwardWeight"
            stage, microbatch = divmod(index, self._num_microbatches)
            yield f"rank {self._stage_ranks[stage]} lacks {name}(stage={stage}, microbatch={microbatch})"

    def _emitted(self) -> list[int]:
        """What would be true if all actions had been done, in whatever order."""
        facts = [0] * len(self._facts)
        for rank, actions in enumerate(self._ranks):
            for part in (part for action in actions for part in parts(action)):
                is_placed = self._places.get((type(part), part.stage)) == (rank, None)
                if is_placed and 0 <= part.microbatch < self._num_microbatches:
                    facts[part.stage * self._num_microbatches + part.microbatch] |= _RULES[type(part)].makes
        return facts

    def _unsent(self) -> Iterator[str]:
        """What should go to the loss or to another rank and does not."""
        wanted = [(_GAVE_LOSS, Loss), (_SENT_OUTPUT, SendOutput)]
        if self._trains:
            wanted.append((_SENT_GRADIENT, SendInputGradient))
        for stage, rank in enumerate(self._stage_ranks):
            for fact, kind in wanted:
                for microbatch in range(self._num_microbatches if (kind, stage) in self._places else 0):
                    if not self._facts[stage * self._num_microbatches + microbatch] & fact:
                        yield f"rank {rank} lacks {kind.__name__}(stage={stage}, microbatch={microbatch})"


def _match(action: Transfer, other: Transfer) -> bool:
    """Whether two transfers, each in its place, are the two sides of one."""
    rule = _RULES[type(action)]
    return (
        type(other) is rule.counterpart
        and other.stage == action.stage + rule.towards
        and other.microbatch == action.microbatch
    )
