"""Backwards in two halves: deferred weight gradients fill the time in which a rank would be idle."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import final

from d9d_pipeline.actions import Part
from d9d_pipeline.schedule import Schedule
from d9d_pipeline.schedules.one_forward_one_backward import Warmup, interleaved_actions


@final
@dataclass(frozen=True)
class ZeroBubble1P(Schedule):
    """ZB1P, the paper's ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241), or interleaved.

    The order is as in 1F1B. Rank r of p defers weight gradients by r microbatches, so each rank holds p microbatches,
    like the first rank of 1F1B. Let F, I and W be the times of a forward, a `BackwardInput` and a `BackwardWeight`.
    With one stage per rank the bubble is (p - 1)(F + I - W), instead of (p - 1)(F + I + W) for 1F1B.

    Attributes:
        stages_per_rank: Number of stages on each rank, v.
        warmup: With several stages per rank, `"short"` holds at most v p pairs. `"long"`, the warm-up of interleaved
            1F1B, holds (v + 1) p - 1. If transfers take no time, both take the same time; otherwise `"long"` overlaps
            transfers better.
        max_activations: Largest number of (stage, microbatch) pairs that a rank may hold; `None` for no bound. The
            smallest possible bound is (v - 1) p + 1 for rounds of p. A bound below v p makes the step longer.
    """

    stages_per_rank: int = 1  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    warmup: Warmup = "short"
    max_activations: int | None = None  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Part]:
        """Return the order of 1F1B with split backwards and deferred weight gradients."""
        return interleaved_actions(rank, num_ranks, num_microbatches, max_delay=rank, **asdict(self))
