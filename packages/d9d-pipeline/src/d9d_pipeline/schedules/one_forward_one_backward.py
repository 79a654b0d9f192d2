"""1F1B and interleaved 1F1B: each backward runs as early as possible, which bounds the microbatches in flight."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, final

from d9d_dist import UserError
from d9d_pipeline.actions import Backward, BackwardInput, BackwardWeight, Forward, Part
from d9d_pipeline.schedule import Schedule


@final
@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """1F1B (Narayanan et al., arXiv:2104.04473): rank r of p holds at most p - r microbatches.

    A step takes as long as with GPipe. On one rank, 1F1B is gradient accumulation.

    Attributes:
        max_activations: Largest number of microbatches that a rank may hold, at least 1; `None` for no bound. A bound
            below p makes the step longer.
    """

    max_activations: int | None = None  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Part]:
        """Return the warm-up forwards, alternating backwards and forwards, and the last backwards."""
        return interleaved_actions(rank, num_ranks, num_microbatches, max_activations=self.max_activations)


@final
@dataclass(frozen=True)
class Interleaved(Schedule):
    """Interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2): v stages per rank divide the bubble by v.

    The m microbatches are divided into rounds: a rank runs a round through all its stages before the next round. In the
    paper a round has p microbatches for p ranks, and m is a multiple of p. For other m, rounds have p or a few more
    microbatches, so that no rank waits for a microbatch of the next round.

    Attributes:
        stages_per_rank: Number of stages on each rank, v.
        max_activations: Largest number of (stage, microbatch) pairs that a rank may hold; `None` for no bound. The
            smallest possible bound is (v - 1) p + 1 for rounds of p. A bound below (v + 1) p - 1 makes the step longer.
    """

    stages_per_rank: int = 2  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    max_activations: int | None = None  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Part]:
        """Return the warm-up forwards, alternating backwards and forwards, and the last backwards."""
        return interleaved_actions(rank, num_ranks, num_microbatches, **asdict(self))


Warmup: TypeAlias = Literal["short", "long"]
"""Length of the warm-up, the forwards of a rank before its first backward, with several stages per rank.

For each rank between this one and the last, `"short"` adds one forward and `"long"` two.
"""


def interleaved_actions(
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    warmup: Warmup = "long",
    max_activations: int | None = None,
    max_delay: int | None = None,
) -> Iterator[Part]:
    """Yield the warm-up forwards, then alternate backwards and forwards, then yield the last backwards.

    `max_delay` splits the backwards: at most this many other `BackwardInput` actions run between a pair's
    `BackwardInput` and `BackwardWeight`. `None` does not split them. Raises `UserError` if `max_activations` is less
    than the smallest possible number of forwards before the first backward.
    """
    rounds = _rounds(num_microbatches, num_ranks)
    stages = [turn * num_ranks + rank for turn in range(stages_per_rank)]
    forwards = [(stage, microbatch) for each in rounds for stage in stages for microbatch in each]
    backwards = [(stage, microbatch) for each in rounds for stage in reversed(stages) for microbatch in each]
    longest = max(len(each) for each in rounds)
    # With one stage per rank there is no interleaving: the warm-up is as long as in 1F1B, not twice as long.
    least = (stages_per_rank - 1) * longest + 1  # forwards up to the first output of the rank's last stage
    short = least + num_ranks - rank - 1
    long = least + 2 * (num_ranks - rank - 1) if stages_per_rank > 1 and warmup == "long" else short
    delay = max_delay or 0
    allowed = long + delay if max_activations is None else max_activations
    if allowed < least:
        raise UserError(
            f"got max_activations = {max_activations} for {stages_per_rank} stages on each of {num_ranks} ranks "
            f"and {num_microbatches} microbatches; expected at least {least}, the forwards before the first "
            "backward. Allow more activations, or use fewer stages per rank."
        )
    # Spend the allowed activations where they save most time: first short warm-up, then deferral, then long warm-up.
    warmed = min(max(min(short, allowed), allowed - delay), long, len(forwards))
    delay = min(delay, allowed - warmed)
    yield from (Forward(*cell) for cell in forwards[:warmed])
    for index, cell in enumerate(backwards):
        yield Backward(*cell) if max_delay is None else BackwardInput(*cell)
        if max_delay is not None and index >= delay:
            yield BackwardWeight(*backwards[index - delay])
        if warmed + index < len(forwards):
            yield Forward(*forwards[warmed + index])
    yield from (BackwardWeight(*cell) for cell in backwards[max(0, len(backwards) - delay) :])


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Split the microbatches into rounds of nearly equal length: as many as possible with at least `num_ranks` each."""
    count = max(1, num_microbatches // num_ranks)
    edges = [index * (num_microbatches // count) + min(index, num_microbatches % count) for index in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]
