"""Two stages on each rank, the second on the way back: microbatches start and end on rank 0, which evens out memory."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from d9d_dist import UserError
from d9d_pipeline.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Overlap
from d9d_pipeline.schedule import Schedule


@final
@dataclass(frozen=True)
class ZeroBubbleV(Schedule):
    """ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362), with the memory of 1F1B.

    The paper repeats a block of what one microbatch does, and closes its gaps. So do we: each rank takes forwards and
    backwards for inputs in the order of the block, and goes ahead with forwards while the pipeline fills. Gradients of
    weights follow at once until forwards run out, and then when nothing else can be done. A rank holds at most 2p
    half-sized stages.

    If all three take the same time, ranks wait p - 1 ticks for every m >= p, and for m >= 2p - 1 only before their
    first and after their last action.
    """

    stages_per_rank = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement = "v"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Sequence[Compute]:
        """What the rank did when all ranks were played through."""
        return play(num_ranks, num_microbatches)[rank]


@lru_cache(maxsize=4)  # the ranks of one program ask for the same game
def play(num_ranks: int, num_microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Let a clock tick, at which each rank does one thing, until everything is done."""
    players = [_Player(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    forwards, gradients = [0] * (2 * num_ranks), [0] * (2 * num_ranks)  # done, as all know at the start of a tick
    while any(player.weights_left for player in players):
        for action in [player.tick(forwards, gradients) for player in players]:
            match action:
                case Forward(stage, microbatch):
                    forwards[stage] = microbatch + 1
                case BackwardInput(stage, microbatch):
                    gradients[stage] = microbatch + 1
    return tuple(tuple(player.done) for player in players)


def _in_turn(rank: int, num_ranks: int, num_microbatches: int) -> deque[Forward | BackwardInput]:
    """What a rank does but for gradients of weights, in the order of the block that is repeated for each microbatch."""
    late = 2 * num_ranks - 1 - rank
    behind = num_ranks - rank - 1  # ranks between this one and the turn
    block = [  # and how many microbatches later than the first of them the rank does each
        (0, Forward, rank),
        (behind, Forward, late),
        (num_ranks - 1, BackwardInput, late),
        (num_ranks - 1 + behind, BackwardInput, rank),
    ]
    timed = [
        (delay + microbatch, place, kind(stage, microbatch))
        for place, (delay, kind, stage) in enumerate(block)
        for microbatch in range(num_microbatches)
    ]
    return deque(action for _, _, action in sorted(timed, key=lambda each: each[:2]))


class _Player:
    """One rank in the game; stages pass microbatches on in order, so that a count says which are there."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.done: list[Compute] = []
        self.weights_left = 2 * num_microbatches
        self._early, self._late = rank, 2 * num_ranks - 1 - rank
        self._num_stages, self._num_microbatches = 2 * num_ranks, num_microbatches
        self._held = 0
        self._waiting: deque[BackwardWeight] = deque()
        self._in_turn = _in_turn(rank, num_ranks, num_microbatches)

    def tick(self, forwards: Sequence[int], gradients: Sequence[int]) -> Compute | None:
        """Do what can be done, if anything."""
        action = self._choose(forwards, gradients)
        match action:
            case Forward():
                self._held += 1
            case BackwardInput(stage, microbatch):
                self._waiting.append(BackwardWeight(stage, microbatch))
            case BackwardWeight():
                self._held -= 1
                self.weights_left -= 1
        if action is not None:
            self.done.append(action)
        return action

    def _choose(self, forwards: Sequence[int], gradients: Sequence[int]) -> Compute | None:
        if self._waiting and self._is_steady(forwards):
            return self._waiting.popleft()
        while self._in_turn and self._is_done(self._in_turn[0], forwards):
            self._in_turn.popleft()
        if self._in_turn and self._is_ready(self._in_turn[0], forwards, gradients):
            return self._in_turn.popleft()
        if gradients[self._late] == 0:  # the pipeline still fills
            for stage in (self._late, self._early):
                ahead = Forward(stage, forwards[stage])
                if ahead.microbatch < self._num_microbatches and self._is_ready(ahead, forwards, gradients):
                    return ahead
        return self._waiting.popleft() if self._waiting else None

    def _is_steady(self, forwards: Sequence[int]) -> bool:
        """Return whether gradients of weights follow those of inputs at once, so that transfers have time to arrive.

        That ends with the backward after the last forward: from then on other ranks wait for gradients of inputs. With
        fewer microbatches than ranks they always do.
        """
        if self._num_microbatches < self._num_stages // 2 or not isinstance(self.done[-1], BackwardInput):
            return False
        return forwards[self._late] < self._num_microbatches or isinstance(self.done[-2], Forward)

    def _is_done(self, action: Forward | BackwardInput, forwards: Sequence[int]) -> bool:
        """Whether it was done ahead of its turn."""
        return isinstance(action, Forward) and action.microbatch < forwards[action.stage]

    def _is_ready(self, action: Forward | BackwardInput, forwards: Sequence[int], gradients: Sequence[int]) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if isinstance(action, Forward):
            return self._held < self._num_stages and (stage == 0 or forwards[stage - 1] > microbatch)
        return forwards[stage] > microbatch and (stage == self._num_stages - 1 or gradients[stage + 1] > microbatch)


@final
@dataclass(frozen=True)
class DualPipeV(Schedule):
    """DualPipe cut in half (https://github.com/deepseek-ai/DualPipe): forwards and backwards overlap in pairs.

    What one of a pair waits for, transfers between experts above all, the other computes through. Holds 2p + 1
    half-sized stages, and needs at least 2p microbatches.
    """

    stages_per_rank = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement = "v"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Compute]:
        """The eight phases of the original, for one direction.

        Raises:
            UserError: If there are fewer than two microbatches for each rank.
        """
        if num_microbatches < 2 * num_ranks:
            raise UserError(
                f"DualPipeV got {num_microbatches} microbatches on {num_ranks} ranks; expected at least "
                f"{2 * num_ranks}. Use more microbatches, or another schedule."
            )
        early, late = _Turn(rank), _Turn(2 * num_ranks - 1 - rank)
        behind = num_ranks - rank - 1  # ranks between this one and the turn
        waiting: deque[BackwardWeight] = deque()
        yield from _filling(early, late, rank, behind, waiting)
        for index in range(num_microbatches - 2 * num_ranks + rank + 1):
            if (
                index == 0 and behind == 0
            ):  # at the turn, the first backward need not wait for a forward to overlap with
                yield early.forward()
                yield late.backward()
            else:
                yield Overlap(early.forward(), late.backward())
            yield Overlap(late.forward(), early.backward())
        for _ in range(behind):
            yield late.backward()
            yield Overlap(late.forward(), early.backward())
        yield from _draining(early, late, rank, behind, waiting)


def _filling(
    early: "_Turn", late: "_Turn", rank: int, behind: int, waiting: deque[BackwardWeight]
) -> Iterator[Compute]:
    """The first three phases: forwards of the earlier stage, of both, and the first backwards of the later one."""
    for _ in range(2 * behind):
        yield early.forward()
    for _ in range(rank + 1):
        yield early.forward()
        yield late.forward()
    for _ in range(behind):
        yield late.backward_input(waiting)
        yield waiting.popleft()
        yield late.forward()


def _draining(
    early: "_Turn", late: "_Turn", rank: int, behind: int, waiting: deque[BackwardWeight]
) -> Iterator[Compute]:
    """The last three phases: backwards of both stages, of the earlier one, and the gradients of weights that are left.

    Half of the first are whole; later, gradients of weights fill the time in which others come back.
    """
    for index in range(2 * (rank + 1)):
        turn = late if index % 2 == 0 else early
        yield turn.backward() if index <= rank else turn.backward_input(waiting)
    for _ in range(behind):
        yield waiting.popleft()
        yield early.backward_input(waiting)
    yield from waiting


class _Turn:
    """Counts the microbatches of one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._forwards = self._backwards = 0

    def forward(self) -> Forward:
        self._forwards += 1
        return Forward(self._stage, self._forwards - 1)

    def backward(self) -> Backward:
        self._backwards += 1
        return Backward(self._stage, self._backwards - 1)

    def backward_input(self, waiting: deque[BackwardWeight]) -> BackwardInput:
        """The first half of a backward; the second joins those that wait."""
        whole = self.backward()
        waiting.append(BackwardWeight(whole.stage, whole.microbatch))
        return BackwardInput(whole.stage, whole.microbatch)
