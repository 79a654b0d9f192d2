"""Verification that a program computes everything once, in a possible order, and cannot deadlock.

The checks read only the program's actions, so they also hold for a program that did not come from `build`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from d9d_dist import UserError
from d9d_pipeline._action_rules import (
    BACKWARD_DONE,
    FORWARD_DONE,
    HAS_INPUT,
    HAS_WEIGHT_GRADIENTS,
    LOSS_DONE,
    RULES,
    TRANSFERS,
    Placed,
    Single,
    places,
)
from d9d_pipeline._deadlock import deadlock_problems
from d9d_pipeline.actions import Action, Backward, BackwardInput, ComputeLoss, Forward, Overlap
from d9d_pipeline.program import Program

_MAX_PROBLEMS = 20  # maximum number of problems listed in an error


class ProgramError(UserError):
    """Error of a program that would hang, would compute a wrong result, or holds too many activations."""


@final
@dataclass(frozen=True, slots=True)
class Verified:
    """Properties of a program that passed verification.

    Attributes:
        peak_activations: For each rank, the largest number of (stage, microbatch) pairs whose activations it holds at a
            time: from the forward until the weight gradients are computed. All zeros if the program has no backward.
    """

    peak_activations: tuple[int, ...]


def verify(program: Program, *, max_activations: int | None = None) -> Verified:
    """Verify that a program is correct and cannot deadlock.

    - Every microbatch runs forward through every stage and into the loss exactly once, on the stage's rank.
    - If the program trains, every microbatch also runs backward through every stage once: a `Backward`, or a
    `BackwardInput` followed by a `BackwardWeight`.
    - The inputs of every action were computed earlier on its rank, or received.
    - Every output and gradient that another rank needs is sent once, and received there once.
    - All ranks finish even if every transfer blocks both of its ranks until it completes.

    The first line of the error names the cause: an action that precedes its inputs, is repeated, misplaced or missing,
    or the transfers of a deadlock.

    Args:
        program: The program, not necessarily from `build`.
        max_activations: Largest allowed number of (stage, microbatch) pairs whose activations a rank holds at a time;
            `None` for no bound.

    Raises:
        ProgramError: If a check fails, or a rank exceeds `max_activations`. The message lists up to 20 problems.
    """
    refuse(_shape_problems(program))
    placed = places(program.stage_ranks)
    facts = [0] * (program.num_stages * program.num_microbatches)
    facts[: program.num_microbatches] = [HAS_INPUT] * program.num_microbatches
    checks = [_RankCheck(program, rank, placed, facts) for rank in range(len(program.ranks))]
    too_early = [check.too_early for check in checks if check.too_early is not None]
    wrong = [problem for check in checks for problem in check.wrong]
    # `too_early` comes first: a missing action may only be a consequence of a misplaced one.
    refuse(too_early + wrong + list(_missing(program, placed, facts)))
    refuse(deadlock_problems(program))
    peaks = tuple(check.peak for check in checks) if program.trains else (0,) * len(checks)
    if max_activations is not None and max(peaks) > max_activations:
        raise ProgramError(
            f"rank {peaks.index(max(peaks))} holds the activations of {max(peaks)} (stage, microbatch) pairs at a "
            f"time; expected at most max_activations = {max_activations}. Increase max_activations, or use a schedule "
            "with this argument: OneForwardOneBackward, Interleaved or ZeroBubble1P."
        )
    return Verified(peaks)


def refuse(problems: list[str]) -> None:
    """Raise a `ProgramError` that lists the problems, if there are any."""
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        lines = problems[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise ProgramError(
            "the program would hang or compute a wrong result; expected every microbatch once forward through every "
            "stage, and once backward if it trains, each on the rank of the stage and after its inputs. Change the "
            "actions of these ranks:\n" + "\n".join(f"  {line}" for line in lines)
        )


def _shape_problems(program: Program) -> list[str]:
    """Return a message for each invalid stage rank, size or action type; these prevent all further checks."""
    num_ranks = len(program.ranks)
    problems = [
        f"stage {stage} is on rank {rank}; expected one of the ranks 0 to {num_ranks - 1}"
        for stage, rank in enumerate(program.stage_ranks)
        if not 0 <= rank < num_ranks
    ]
    if not program.stage_ranks or program.num_microbatches < 1:
        problems.append(
            f"the program has {program.num_stages} stages and {program.num_microbatches} microbatches; expected at "
            "least one of each"
        )
    for rank, actions in enumerate(program.ranks):
        unknown = [action for action in actions if type(action) not in RULES and not _is_overlap(action)]
        problems += [f"rank {rank} has {action!r}, which is not an action" for action in unknown]
    return problems


def _is_overlap(action: Any) -> bool:
    return (
        isinstance(action, Overlap)
        and isinstance(action.forward, Forward)
        and isinstance(action.backward, Backward | BackwardInput)
    )


class _RankCheck:
    """Check of one rank's actions in order, assuming that every receive succeeds immediately.

    `facts` has the facts that hold for each (stage, microbatch) pair, updated for the stages of this rank. `too_early`
    is the message for the first action that runs before an action that it needs.
    """

    def __init__(self, program: Program, rank: int, placed: Placed, facts: list[int]) -> None:
        self._rank, self._placed, self._facts = rank, placed, facts
        self._actions = program.ranks[rank]
        self._stage_ranks, self._num_microbatches = program.stage_ranks, program.num_microbatches
        self.wrong: list[str] = []
        self.too_early: str | None = None
        self.peak = self._held = 0
        for position, action in enumerate(self._actions):
            together = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
            valid = [part for part in together if self._check(action, part, position)]
            for part in valid:
                self._apply(part)

    def _check(self, action: Action, part: Single, position: int) -> bool:
        """Check an action, or one part of an overlap. Return True if it belongs on this rank."""
        rule, stage, microbatch = RULES[type(part)], part.stage, part.microbatch
        peer = part.peer if isinstance(part, TRANSFERS) else None
        is_placed = self._placed.get((type(part), stage)) == (self._rank, peer)
        if not is_placed or not 0 <= microbatch < self._num_microbatches:
            self.wrong.append(f"rank {self._rank} has {action!r}{self._misplaced(part, stage + rule.towards)}")
            return False
        facts = self._facts[stage * self._num_microbatches + microbatch]
        if facts & rule.makes:
            self.wrong.append(f"rank {self._rank} has {action!r}, which is repeated")
        if facts & rule.needs != rule.needs and self.too_early is None:
            needed = self._find_producer(stage, microbatch, rule.needs & ~facts, position)
            if needed is not None:  # if None, `_missing` reports the absent action
                self.too_early = f"rank {self._rank} has {action!r} before {rule.lacks}: {needed!r} comes later"
        return True

    def _misplaced(self, part: Single, neighbor: int) -> str:
        """Return the part of the message with the reason why an action is misplaced or invalid."""
        last = len(self._stage_ranks) - 1
        if not (0 <= part.stage <= last and 0 <= part.microbatch < self._num_microbatches):
            return f", expected stages up to {last} and microbatches up to {self._num_microbatches - 1}"
        if self._stage_ranks[part.stage] != self._rank:
            return f", but stage {part.stage} is on rank {self._stage_ranks[part.stage]}"
        if isinstance(part, ComputeLoss):
            return f", but only stage {last} has a loss"
        if not 0 <= neighbor <= last:
            return f", but there is no stage {neighbor}"
        holder = self._stage_ranks[neighbor]
        return f", but stage {neighbor} is on " + ("the same rank" if holder == self._rank else f"rank {holder}")

    def _find_producer(self, stage: int, microbatch: int, facts: int, position: int) -> Single | None:
        """Return the first action at or after `position` that makes one of the facts true; `None` if there is none."""
        for action in self._actions[position:]:
            for part in (action.forward, action.backward) if isinstance(action, Overlap) else (action,):
                rule = RULES[type(part)]
                makes = rule.makes if part.stage == stage else 0
                hands = rule.hands if part.stage + rule.towards == stage else 0
                if part.microbatch == microbatch and (makes | hands) & facts:
                    return part
        return None

    def _apply(self, part: Single) -> None:
        """Update the facts and the number of held pairs after an action."""
        rule = RULES[type(part)]
        cell = part.stage * self._num_microbatches + part.microbatch
        self._facts[cell] |= rule.makes
        if rule.hands:
            neighbor = part.stage + rule.towards
            if 0 <= neighbor < len(self._stage_ranks) and self._stage_ranks[neighbor] == self._rank:
                self._facts[cell + rule.towards * self._num_microbatches] |= rule.hands
        if rule.holds:
            self._held += rule.holds
            self.peak = max(self.peak, self._held)


def _missing(program: Program, placed: Placed, facts: Sequence[int]) -> Iterator[str]:
    """Yield a message for each absent action, unless its absence follows from another absent action."""
    computed, exchanged = FORWARD_DONE, TRANSFERS[:2]
    if program.trains:
        computed, exchanged = FORWARD_DONE | BACKWARD_DONE | HAS_WEIGHT_GRADIENTS, TRANSFERS
    for stage, rank in enumerate(program.stage_ranks):
        loss = LOSS_DONE if stage == program.num_stages - 1 else 0
        transfers = [kind for kind in exchanged if (kind, stage) in placed]
        complete = computed | loss | sum(RULES[kind].makes for kind in transfers)
        for microbatch in range(program.num_microbatches):
            cell = stage * program.num_microbatches + microbatch
            if facts[cell] & complete == complete:
                continue
            place = f"stage={stage}, microbatch={microbatch}"
            if missing := computed & ~facts[cell]:
                backward = "BackwardInput" if facts[cell] & HAS_WEIGHT_GRADIENTS else "Backward"
                name = (
                    "Forward" if missing & FORWARD_DONE else backward if missing & BACKWARD_DONE else "BackwardWeight"
                )
                yield f"rank {rank} lacks {name}({place})"
            if loss & ~facts[cell] and facts[cell] & FORWARD_DONE:
                yield f"rank {rank} lacks ComputeLoss({place})"
            for kind in transfers:
                rule = RULES[kind]
                # A send depends on this stage's computation, a receive on the adjacent stage's send.
                source, cause = cell, rule.needs
                if rule.counterpart is not None and not rule.needs:
                    source += rule.towards * program.num_microbatches
                    cause = RULES[rule.counterpart].makes
                if rule.makes & ~facts[cell] and facts[source] & cause:
                    yield f"rank {rank} lacks {kind.__name__}({place}, peer={placed[kind, stage][1]})"
