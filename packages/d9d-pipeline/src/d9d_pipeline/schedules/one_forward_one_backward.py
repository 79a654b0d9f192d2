"""1F1B and its interleaved form: backward as early as possible, so that few microbatches are under way."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import Backward, Forward
from d9d_pipeline.schedule import Schedule


@final
@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """1F1B (Narayanan et al., arXiv:2104.04473): rank r of p holds at most p - r microbatches.

    Takes as long as GPipe. On a single rank it is gradient accumulation: forward and backward of one microbatch after
    the other.
    """

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """Forwards until the pipeline is full, then one backward and one forward in turn, then the last backwards."""
        warmup = min(num_ranks - rank, num_microbatches)
        for microbatch in range(warmup):
            yield Forward(rank, microbatch)
        for microbatch in range(num_microbatches):
            yield Backward(rank, microbatch)
            if warmup + microbatch < num_microbatches:
                yield Forward(rank, warmup + microbatch)


@final
@dataclass(frozen=True)
class Interleaved(Schedule):
    """Interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2): v stages on a rank, and v times less bubble.

    Microbatches pass in rounds, each through all stages of a rank. The paper's rounds are of p microbatches; where p
    does not divide m, they are of p or a few more here, so that nobody waits for a microbatch of the next round.

    Attributes:
        stages_per_rank: How many stages each rank holds.
    """

    stages_per_rank: int = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | Backward]:
        """Forwards until the pipeline is full, then one backward and one forward in turn, then the last backwards."""
        order = InterleavedOrder.of(rank, num_ranks, num_microbatches, self.stages_per_rank)
        for cell in order.forwards[: order.warmup]:
            yield Forward(*cell)
        for index, cell in enumerate(order.backwards):
            yield Backward(*cell)
            if order.warmup + index < len(order.forwards):
                yield Forward(*order.forwards[order.warmup + index])


@final
@dataclass(frozen=True, slots=True)
class InterleavedOrder:
    """The order in which a rank meets its (stage, microbatch) pairs.

    Attributes:
        forwards: Forward.
        backwards: Backward.
        warmup: How many forwards come before the first backward.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    warmup: int

    @staticmethod
    def of(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> "InterleavedOrder":
        """The order for one rank."""
        rounds = _rounds(num_microbatches, num_ranks)
        stages = [turn * num_ranks + rank for turn in range(stages_per_rank)]
        forwards = [(stage, microbatch) for each in rounds for stage in stages for microbatch in each]
        backwards = [(stage, microbatch) for each in rounds for stage in reversed(stages) for microbatch in each]
        longest = max(len(each) for each in rounds)
        # One stage on a rank is not interleaved: it fills the pipeline as 1F1B does, not twice as deep.
        behind = num_ranks - rank - 1
        warmup = 1 + (2 * behind + (stages_per_rank - 1) * longest if stages_per_rank > 1 else behind)
        return InterleavedOrder(forwards, backwards, min(warmup, len(forwards)))


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Consecutive microbatches, in as many rounds of at least `num_ranks` as there can be, of nearly equal lengths."""
    count = max(1, num_microbatches // num_ranks)
    edges = [index * (num_microbatches // count) + min(index, num_microbatches % count) for index in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]
