"""Forward passes of batches through a pipeline, for evaluation and inference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from d9d_dist import DistributedContext
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.task import to_inputs
from d9d_pipeline import Executor, Inputs, OutputHandler


@final
class ForwardRunner:
    """Runner of forward passes: several batches in one executor step, at most `batches_per_step`.

    `inputs` returns the model's inputs for a batch, as `BatchTask.inputs` does.
    """

    def __init__(
        self, pipeline: Pipeline, inputs: Callable[[Any], Inputs | Mapping[str, Any]], ctx: DistributedContext
    ) -> None:
        self._pipeline, self._inputs = pipeline, inputs
        num_ranks = ctx.size("batch", "pp")
        self.batches_per_step = 2 * num_ranks if num_ranks > 1 else 1
        self._executors: dict[int, Executor] = {}

    def __call__(self, batches: Sequence[Any], on_outputs: OutputHandler) -> None:
        """Run one step. Collective over the ranks that hold parts of the model.

        `batches` are on the device, and every rank passes the same number of them. The ranks of the last stage call
        `on_outputs` with the outputs and the index of each batch.
        """
        if len(batches) not in self._executors:
            self._executors[len(batches)] = self._pipeline.evaluation(len(batches))
        self._executors[len(batches)].step([to_inputs(self._inputs(batch)) for batch in batches], on_outputs)
