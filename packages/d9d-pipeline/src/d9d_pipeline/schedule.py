"""A schedule says in which order a rank computes; everything else is derived from what it says."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import final

from d9d_pipeline.actions import Action, Backward, Forward


class Schedule(ABC):
    """Emits the actions of each rank in order. A schedule of one's own is a subclass, passed as an object.

    Attributes:
        stages_per_rank: How many stages each rank holds; rank r holds the stages r, r + num_ranks, ...
    """

    stages_per_rank: int = 1

    @abstractmethod
    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterable[Action]:
        """The actions of one rank for one step, in the order in which it performs them."""


@final
class ForwardOnly(Schedule):
    """Inference and evaluation: each microbatch goes forward once."""

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """One forward for each microbatch."""
        for microbatch in range(num_microbatches):
            yield Forward(rank, microbatch)


@final
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., "GPipe", arXiv:1811.06965); holds every microbatch at once."""

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """All forwards, then all backwards, first in first out."""
        for microbatch in range(num_microbatches):
            yield Forward(rank, microbatch)
        for microbatch in range(num_microbatches):
            yield Backward(rank, microbatch)


@final
class OneForwardOneBackward(Schedule):
    """1F1B (Narayanan et al., arXiv:2104.04473): rank r of p holds at most p - r microbatches.

    On a single rank it is gradient accumulation: forward and backward of one microbatch after the other.
    """

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Forwards until the pipeline is full, then one backward and one forward in turn, then the last backwards."""
        warmup = min(num_ranks - rank, num_microbatches)
        for microbatch in range(warmup):
            yield Forward(rank, microbatch)
        for microbatch in range(num_microbatches):
            yield Backward(rank, microbatch)
            if warmup + microbatch < num_microbatches:
                yield Forward(rank, warmup + microbatch)
