"""Schedules with V placement: microbatches start and end on rank 0, which balances memory over the ranks."""

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

    As in the paper, one block of actions is repeated for every microbatch, and then the gaps are closed. Each rank runs
    forwards and `BackwardInput` actions in the order of the block, with early forwards while the pipeline fills. A
    `BackwardWeight` follows its `BackwardInput` directly until the forwards run out, and afterwards fills idle time.
    With p ranks, a rank holds at most 2p (stage, microbatch) pairs, of stages half as large as with 1F1B.

    If forward, `BackwardInput` and `BackwardWeight` each take one unit, ranks are idle for p - 1 units, for any number
    of microbatches m >= p. For m >= 2p - 1 they are idle only before their first and after their last action.
    """

    stages_per_rank = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement = "v"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Sequence[Compute]:
        """Return the rank's actions from the simulation of all ranks."""
        return _simulate_ranks(num_ranks, num_microbatches)[rank]


@lru_cache(maxsize=4)  # all ranks of one program use the same result
def _simulate_ranks(num_ranks: int, num_microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Simulate all ranks in time steps of one action per rank, and return the actions of each rank."""
    simulated = [_SimulatedRank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    forwards, gradients = [0] * (2 * num_ranks), [0] * (2 * num_ranks)  # microbatches done by stage, before this step
    while any(rank.weights_left for rank in simulated):
        for action in [rank.advance(forwards, gradients) for rank in simulated]:
            match action:
                case Forward(stage, microbatch):
                    forwards[stage] = microbatch + 1
                case BackwardInput(stage, microbatch):
                    gradients[stage] = microbatch + 1
    return tuple(tuple(rank.done) for rank in simulated)


def _block_order(rank: int, num_ranks: int, num_microbatches: int) -> deque[Forward | BackwardInput]:
    """Return a rank's `Forward` and `BackwardInput` actions in the order of the block, repeated for each microbatch."""
    late = 2 * num_ranks - 1 - rank
    behind = num_ranks - rank - 1  # number of ranks after this one; the V turns at the last rank
    block = [  # delay in microbatches relative to the first action, type of action, stage
        (0, Forward, rank),
        (behind, Forward, late),
        (num_ranks - 1, BackwardInput, late),
        (num_ranks - 1 + behind, BackwardInput, rank),
    ]
    timed = [
        (delay + microbatch, position, kind(stage, microbatch))
        for position, (delay, kind, stage) in enumerate(block)
        for microbatch in range(num_microbatches)
    ]
    return deque(action for _, _, action in sorted(timed, key=lambda each: each[:2]))


class _SimulatedRank:
    """Rank of the simulation; since stages process microbatches in order, one counter per stage is enough."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.done: list[Compute] = []
        self.weights_left = 2 * num_microbatches
        self._early, self._late = rank, 2 * num_ranks - 1 - rank
        self._num_stages, self._num_microbatches = 2 * num_ranks, num_microbatches
        self._held = 0
        self._deferred: deque[BackwardWeight] = deque()
        self._remaining = _block_order(rank, num_ranks, num_microbatches)

    def advance(self, forwards: Sequence[int], gradients: Sequence[int]) -> Compute | None:
        """Run one action if possible, and return it. The arguments count the finished actions of each type by stage."""
        action = self._choose(forwards, gradients)
        match action:
            case Forward():
                self._held += 1
            case BackwardInput(stage, microbatch):
                self._deferred.append(BackwardWeight(stage, microbatch))
            case BackwardWeight():
                self._held -= 1
                self.weights_left -= 1
        if action is not None:
            self.done.append(action)
        return action

    def _choose(self, forwards: Sequence[int], gradients: Sequence[int]) -> Compute | None:
        if self._deferred and self._is_steady(forwards):
            return self._deferred.popleft()
        while self._remaining and self._is_done(self._remaining[0], forwards):
            self._remaining.popleft()
        if self._remaining and self._is_ready(self._remaining[0], forwards, gradients):
            return self._remaining.popleft()
        if gradients[self._late] == 0:  # warm-up: the pipeline is not full yet
            for stage in (self._late, self._early):
                ahead = Forward(stage, forwards[stage])
                if ahead.microbatch < self._num_microbatches and self._is_ready(ahead, forwards, gradients):
                    return ahead
        return self._deferred.popleft() if self._deferred else None

    def _is_steady(self, forwards: Sequence[int]) -> bool:
        """Return True if the pending `BackwardWeight` should run directly after its `BackwardInput`.

        Running it there overlaps it with the transfers. It is deferred where other ranks wait for input gradients:
        after the last forward, and always with fewer microbatches than ranks.
        """
        if self._num_microbatches < self._num_stages // 2 or not isinstance(self.done[-1], BackwardInput):
            return False
        return forwards[self._late] < self._num_microbatches or isinstance(self.done[-2], Forward)

    def _is_done(self, action: Forward | BackwardInput, forwards: Sequence[int]) -> bool:
        """Return True if a forward already ran early, during the warm-up."""
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

    While one action of a pair waits for communication, mainly the all-to-all of expert parallelism, the other computes.
    With p ranks, a rank holds at most 2p + 1 (stage, microbatch) pairs, of stages half as large as with 1F1B. The
    schedule needs at least 2p microbatches.
    """

    stages_per_rank = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    placement = "v"  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Compute]:
        """Yield the eight phases of the original schedule, for one direction."""
        if num_microbatches < 2 * num_ranks:
            raise UserError(
                f"DualPipeV got {num_microbatches} microbatches on {num_ranks} ranks; expected at least "
                f"{2 * num_ranks}, two per rank. Use more microbatches, or another schedule."
            )
        early, late = _StageCounter(rank), _StageCounter(2 * num_ranks - 1 - rank)
        behind = num_ranks - rank - 1  # number of ranks after this one; the V turns at the last rank
        deferred: deque[BackwardWeight] = deque()
        yield from _warmup(early, late, rank, behind, deferred)
        for index in range(num_microbatches - 2 * num_ranks + rank + 1):
            if index == 0 and behind == 0:  # on the last rank, the first pair does not overlap
                yield early.forward()
                yield late.backward()
            else:
                yield Overlap(early.forward(), late.backward())
            yield Overlap(late.forward(), early.backward())
        for _ in range(behind):
            yield late.backward()
            yield Overlap(late.forward(), early.backward())
        yield from _cooldown(early, late, rank, behind, deferred)


def _warmup(
    early: "_StageCounter", late: "_StageCounter", rank: int, behind: int, deferred: deque[BackwardWeight]
) -> Iterator[Compute]:
    """Yield phases 1 to 3: forwards of the early stage, forwards of both stages, first backwards of the late stage."""
    for _ in range(2 * behind):
        yield early.forward()
    for _ in range(rank + 1):
        yield early.forward()
        yield late.forward()
    for _ in range(behind):
        yield late.backward_input(deferred)
        yield deferred.popleft()
        yield late.forward()


def _cooldown(
    early: "_StageCounter", late: "_StageCounter", rank: int, behind: int, deferred: deque[BackwardWeight]
) -> Iterator[Compute]:
    """Yield the last three phases, in which deferred weight gradients fill the wait for input gradients."""
    for index in range(2 * (rank + 1)):
        stage = late if index % 2 == 0 else early
        yield stage.backward() if index <= rank else stage.backward_input(deferred)
    for _ in range(behind):
        yield deferred.popleft()
        yield early.backward_input(deferred)
    yield from deferred


class _StageCounter:
    """Generator of the actions of one stage, one microbatch after the other."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._forwards = self._backwards = 0

    def forward(self) -> Forward:
        self._forwards += 1
        return Forward(self._stage, self._forwards - 1)

    def backward(self) -> Backward:
        self._backwards += 1
        return Backward(self._stage, self._backwards - 1)

    def backward_input(self, deferred: deque[BackwardWeight]) -> BackwardInput:
        """Return the next `BackwardInput`, and append its `BackwardWeight` to `deferred`."""
        whole = self.backward()
        deferred.append(BackwardWeight(whole.stage, whole.microbatch))
        return BackwardInput(whole.stage, whole.microbatch)
