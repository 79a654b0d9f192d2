"""Executors of training steps, built when a number of microbatches is first used, and their gradient reduction."""

from typing import final

from d9d_dist import UserError
from d9d_loop.job.pipeline import Pipeline
from d9d_pipeline import Executor


@final
class StepExecutors:
    """Executors of a pipeline's training steps by number of microbatches. The constructor is collective.

    Attributes:
        gradient_sync: Reduction of the gradients that FSDP does not reduce.

    Args:
        pipeline: This rank's pipeline stages.
        num_microbatches: Number of microbatches that most steps have; the schedule must support it.
    """

    def __init__(self, pipeline: Pipeline, num_microbatches: int) -> None:
        self._pipeline = pipeline
        self._splits = pipeline.program(num_microbatches).splits
        self._executors = {num_microbatches: pipeline.training(num_microbatches)}
        self._supported: dict[int, int] = {num_microbatches: num_microbatches}
        self.gradient_sync = pipeline.gradient_sync(num_microbatches)

    def get(self, num_microbatches: int) -> Executor:
        """Return the executor of a step, and prepare the gradient reduction for its backward passes. No collectives."""
        if num_microbatches not in self._executors:
            self._executors[num_microbatches] = self._pipeline.training(num_microbatches)
        # With split backward, a parameter that is used twice may accumulate its gradient in two parts.
        self.gradient_sync.num_microbatches = None if self._splits else num_microbatches
        return self._executors[num_microbatches]

    def supported(self, num_microbatches: int) -> int:
        """Return the smallest supported number of microbatches that is at least `num_microbatches`.

        Some schedules require, for example, a multiple of the number of pipeline ranks.
        """
        if num_microbatches not in self._supported:
            self._supported[num_microbatches] = next(filter(self._is_supported, self._candidates(num_microbatches)))
        return self._supported[num_microbatches]

    def _candidates(self, num_microbatches: int) -> range:
        # Each schedule supports large enough multiples of twice the number of stages. This range has two of them.
        period = 2 * self._pipeline.num_stages
        return range(num_microbatches, num_microbatches + 2 * period + 1)

    def _is_supported(self, num_microbatches: int) -> bool:
        try:
            program = self._pipeline.program(num_microbatches)
        except UserError:
            return False
        # Either all backward passes are split or none are, because FSDP is configured only once.
        return program.splits == self._splits
