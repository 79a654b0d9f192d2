"""The proof that a program computes everything once, in a possible order, and that no two ranks wait for each other.

Nothing is taken over from how a program is built: a program from anywhere, changed by hand, is judged by what it says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from d9d_dist import UserError
from d9d_pipeline._action_rules import (
    GAVE_LOSS,
    HAS_GRADIENT,
    HAS_INPUT,
    HAS_WEIGHTS,
    RAN,
    RAN_BACK,
    RULES,
    SENT_GRADIENT,
    SENT_OUTPUT,
    TRANSFERS,
    Placed,
    Single,
    places,
)
from d9d_pipeline._deadlock import deadlock_problems
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    Forward,
    Loss,
    Overlap,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
)

if TYPE_CHECKING:
    from d9d_pipeline.program import Program

_MAX_PROBLEMS = 20  # that are listed

_SENDS = (SendOutput, SendInputGradient)
# Transfers with the fact that each makes, and the fact without which it is not missed.
_EXCHANGED: tuple[tuple[type[Any], int, int], ...] = (
    (SendOutput, SENT_OUTPUT, RAN),
    (ReceiveInput, HAS_INPUT, SENT_OUTPUT),
    (SendInputGradient, SENT_GRADIENT, RAN_BACK),
    (ReceiveOutputGradient, HAS_GRADIENT, SENT_GRADIENT),
)


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


def verify(program: "Program", *, max_activations: int | None = None) -> Verified:
    """Prove that a program is right.

    - Every microbatch goes forward once through every stage and into the loss, and, if anything goes backward, backward
      once: whole, or first for the inputs and then for the weights. Each on the rank that holds the stage.
    - What an action needs was computed before on its rank, or received.
    - Every output and gradient that another rank needs is sent once, and received there once.
    - Were every transfer to block both its ranks until it is done, all ranks would still come to their end.

    The first line of the error names the cause: an action that comes before what it needs, is repeated, belongs on
    another rank or is missing; or else the transfers over whose order ranks wait for each other.

    Args:
        program: From anywhere.
        max_activations: Largest allowed number of (stage, microbatch) pairs whose activations a rank holds at a time;
            `None` for no bound.

    Raises:
        ProgramError: Listing what is wrong.
    """
    refuse(_shape_problems(program))
    placed = places(program.stage_ranks)
    facts = [0] * (program.num_stages * program.num_microbatches)
    facts[: program.num_microbatches] = [HAS_INPUT] * program.num_microbatches
    checks = [_RankCheck(program, rank, placed, facts) for rank in range(len(program.ranks))]
    too_early = [check.too_early for check in checks if check.too_early is not None]
    wrong = [problem for check in checks for problem in check.wrong]
    # Without the loss of an output that comes too late, `build` would seem to forget it.
    refuse(too_early + wrong + list(_missing(program, placed, facts)))
    refuse(deadlock_problems(program))
    peaks = tuple(check.peak for check in checks) if program.trains else (0,) * len(checks)
    if max_activations is not None and max(peaks) > max_activations:
        raise ProgramError(
            f"rank {peaks.index(max(peaks))} holds the activations of {max(peaks)} (stage, microbatch) pairs at a "
            f"time; expected at most max_activations = {max_activations}. Allow more, or use a schedule that holds "
            "fewer: OneForwardOneBackward, Interleaved and ZeroBubble1P take the bound as an argument."
        )
    return Verified(peaks)


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
    """Return what is wrong before any action is looked at."""
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
        strange = [action for action in actions if type(action) not in RULES and not _is_overlap(action)]
        problems += [f"rank {rank} has {action!r}, which is no action" for action in strange]
    return problems


def _is_overlap(action: Any) -> bool:
    return (
        isinstance(action, Overlap)
        and isinstance(action.forward, Forward)
        and isinstance(action.backward, Backward | BackwardInput)
    )


class _RankCheck:
    """Plays one rank alone, as if every transfer succeeded at once.

    Attributes:
        wrong: Actions that are repeated, or belong on another rank or nowhere.
        too_early: The first action that comes before another one that it needs; `None` if there is none.
        peak: Largest number of held activations.

    Args:
        program: The program.
        rank: The rank.
        placed: The place of each kind of action by stage.
        facts: What is true by stage and microbatch; updated for the stages of this rank.
    """

    def __init__(self, program: "Program", rank: int, placed: Placed, facts: list[int]) -> None:
        self._rank, self._placed, self._facts = rank, placed, facts
        self._actions = program.ranks[rank]
        self._stage_ranks, self._num_microbatches = program.stage_ranks, program.num_microbatches
        self.wrong: list[str] = []
        self.too_early: str | None = None
        self.peak = self._held = 0
        for position, action in enumerate(self._actions):
            together = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
            fitting = [part for part in together if self._is_fitting(action, part, position)]
            for part in fitting:
                self._note(part)

    def _is_fitting(self, action: Action, part: Single, position: int) -> bool:
        """Check an action, or a part of an overlap. Return whether it belongs on this rank."""
        rule, stage, microbatch = RULES[type(part)], part.stage, part.microbatch
        peer = part.peer if isinstance(part, TRANSFERS) else None
        is_placed = self._placed.get((type(part), stage)) == (self._rank, peer)
        if not is_placed or not 0 <= microbatch < self._num_microbatches:
            self.wrong.append(f"rank {self._rank} has {action!r}{self._misplaced(part, stage + rule.towards)}")
            return False
        facts = self._facts[stage * self._num_microbatches + microbatch]
        if facts & rule.makes:
            self.wrong.append(f"rank {self._rank} has {action!r}, which was done before")
        if facts & rule.needs != rule.needs and self.too_early is None:
            needed = self._maker(stage, microbatch, rule.needs & ~facts, position)
            if needed is not None:  # else it is missing
                self.too_early = f"rank {self._rank} has {action!r} before {rule.lacks}: {needed!r} comes later"
        return True

    def _misplaced(self, part: Single, neighbour: int) -> str:
        """Say why an action belongs elsewhere, or nowhere."""
        last = len(self._stage_ranks) - 1
        if not (0 <= part.stage <= last and 0 <= part.microbatch < self._num_microbatches):
            return f", expected stages up to {last} and microbatches up to {self._num_microbatches - 1}"
        if self._stage_ranks[part.stage] != self._rank:
            return f", not its own: stage {part.stage} is on rank {self._stage_ranks[part.stage]}"
        if isinstance(part, Loss):
            return f", but only stage {last} has a loss"
        if not 0 <= neighbour <= last:
            return f", but there is no stage {neighbour}"
        holder = self._stage_ranks[neighbour]
        return f", but stage {neighbour} is on " + ("the same rank" if holder == self._rank else f"rank {holder}")

    def _maker(self, stage: int, microbatch: int, facts: int, position: int) -> Single | None:
        """Return the first action from a position on that makes one of some facts true."""
        for action in self._actions[position:]:
            for part in (action.forward, action.backward) if isinstance(action, Overlap) else (action,):
                rule = RULES[type(part)]
                makes = rule.makes if part.stage == stage else 0
                hands = rule.hands if part.stage + rule.towards == stage else 0
                if part.microbatch == microbatch and (makes | hands) & facts:
                    return part
        return None

    def _note(self, part: Single) -> None:
        """Record what is true after an action."""
        rule = RULES[type(part)]
        cell = part.stage * self._num_microbatches + part.microbatch
        self._facts[cell] |= rule.makes
        if rule.hands:
            neighbour = part.stage + rule.towards
            if 0 <= neighbour < len(self._stage_ranks) and self._stage_ranks[neighbour] == self._rank:
                self._facts[cell + rule.towards * self._num_microbatches] |= rule.hands
        if rule.holds:
            self._held += rule.holds
            self.peak = max(self.peak, self._held)


def _missing(program: "Program", placed: Placed, facts: Sequence[int]) -> Iterator[str]:
    """Yield the actions that are nowhere, but none whose lack follows from another one's."""
    computed, exchanged = RAN, _EXCHANGED[:2]
    if program.trains:
        computed, exchanged = RAN | RAN_BACK | HAS_WEIGHTS, _EXCHANGED
    for stage, rank in enumerate(program.stage_ranks):
        loss = GAVE_LOSS if stage == program.num_stages - 1 else 0
        mine = [each for each in exchanged if (each[0], stage) in placed]
        complete = computed | loss | sum(made for _, made, _ in mine)
        for microbatch in range(program.num_microbatches):
            cell = stage * program.num_microbatches + microbatch
            if facts[cell] & complete == complete:
                continue
            where = f"stage={stage}, microbatch={microbatch}"
            if missing := computed & ~facts[cell]:
                backward = "BackwardInput" if facts[cell] & HAS_WEIGHTS else "Backward"
                name = "Forward" if missing & RAN else backward if missing & RAN_BACK else "BackwardWeight"
                yield f"rank {rank} lacks {name}({where})"
            if loss & ~facts[cell] and facts[cell] & RAN:
                yield f"rank {rank} lacks Loss({where})"
            for kind, made, cause in mine:
                # What is sent was computed on this stage, and what is received was sent from the neighbour.
                source = cell if kind in _SENDS else cell + RULES[kind].towards * program.num_microbatches
                if made & ~facts[cell] and facts[source] & cause:
                    yield f"rank {rank} lacks {kind.__name__}({where}, peer={placed[kind, stage][1]})"
