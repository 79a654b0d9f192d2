"""Backwards in two halves: gradients of weights wait, and fill the time in which a rank would wait for others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from d9d_pipeline.actions import BackwardInput, BackwardWeight, Forward
from d9d_pipeline.schedule import Schedule
from d9d_pipeline.schedules.one_forward_one_backward import InterleavedOrder, Warmup


@final
@dataclass(frozen=True)
class ZeroBubble1P(Schedule):
    """ZB1P, the paper's ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241), also interleaved.

    The order is that of 1F1B. Rank r computes gradients of weights r microbatches late, and so holds p microbatches, as
    the first rank of 1F1B does. With a forward of F, a backward for inputs of I and one for weights of W, one stage on
    a rank has a bubble of (p - 1)(F + I - W) instead of (p - 1)(F + I + W).

    Attributes:
        stages_per_rank: How many stages each rank holds.
        warmup: With several stages on a rank, `"short"` holds at most v p pairs. `"long"`, the warm-up of interleaved
            1F1B, holds (v + 1) p - 1. Both take the same time if transfers take none; `"long"` hides transfers better.
        max_activations: Largest number of (stage, microbatch) pairs that a rank may hold; `None` for no bound. At least
            (v - 1) p + 1 for rounds of p; fewer than v p cost time.
    """

    stages_per_rank: int = 1  # ty: ignore[incompatible-attribute-override] - read-only on purpose
    warmup: Warmup = "short"
    max_activations: int | None = None  # ty: ignore[incompatible-attribute-override] - read-only on purpose

    def actions(
        self, rank: int, num_ranks: int, num_microbatches: int
    ) -> Iterator[Forward | BackwardInput | BackwardWeight]:
        """1F1B with each backward in two, the second of them late.

        Raises:
            UserError: If `max_activations` is too small.
        """
        order = InterleavedOrder.of(
            rank,
            num_ranks,
            num_microbatches,
            self.stages_per_rank,
            warmup=self.warmup,
            max_delay=rank,
            max_activations=self.max_activations,
        )
        for cell in order.forwards[: order.warmup]:
            yield Forward(*cell)
        for index, cell in enumerate(order.backwards):
            yield BackwardInput(*cell)
            if index >= order.delay:
                yield BackwardWeight(*order.backwards[index - order.delay])
            if order.warmup + index < len(order.forwards):
                yield Forward(*order.forwards[order.warmup + index])
        for cell in order.backwards[max(0, len(order.backwards) - order.delay) :]:
            yield BackwardWeight(*cell)
