"""Scores of tokens: forward passes without gradients that return values per token in the order of the batches."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor

from d9d_dist import DistributedContext, UserError
from d9d_loop.engine.microbatches import MicrobatchAgreement
from d9d_loop.engine.token_values import TokenValues
from d9d_loop.evaluation_mode import evaluation_mode
from d9d_loop.job.forward_runner import ForwardRunner
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.task import BatchTask, to_inputs
from d9d_pipeline import Inputs

ReadTokens: TypeAlias = Callable[[Any, Any], Mapping[str, Tensor]]
"""Function of the model's outputs for a batch and the batch; returns values per token [B, L] by name."""


@final
class Scorer:
    """Forward passes of an engine's `score`.

    Args:
        pipeline: This rank's stages of the model.
        task: Prepares the model's inputs from a batch.
        agree: Agrees with the other ranks on the number of batches.
        token_values: Joins the values and sends them to all ranks.
        ctx: Distributed context.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        task: BatchTask,
        *,
        agree: MicrobatchAgreement,
        token_values: TokenValues,
        ctx: DistributedContext,
    ) -> None:
        self._pipeline, self._task, self._agree, self._token_values = pipeline, task, agree, token_values
        self._plain = ForwardRunner(pipeline, task.inputs, ctx)
        self._scoring = ForwardRunner(pipeline, self._inputs, ctx)

    def __call__(self, batches: Sequence[Any], read: ReadTokens | None) -> list[Mapping[str, Tensor]]:
        """See `Engine.score`."""
        if read is None:
            self._check()
        given = self._agree(batches, lambda number: number)
        values: dict[int, Mapping[str, Tensor]] = {}
        run = self._scoring if read is None else self._plain
        with evaluation_mode(self._pipeline.model):
            for start in range(0, len(given.batches), run.batches_per_step):
                some = given.batches[start : start + run.batches_per_step]

                def take(outputs: Any, number: int, start: int = start, some: Sequence[Any] = some) -> None:
                    if start + number < given.num_own:
                        values[start + number] = outputs if read is None else read(outputs, some[number])

                run(some, take)
        return self._token_values([values[index] for index in sorted(values)])

    def _inputs(self, batch: Any) -> Inputs:
        inputs = to_inputs(self._task.inputs(batch))
        return Inputs(*inputs.first, **{**inputs.shared, "scores": True})

    def _check(self) -> None:
        for stage in self._pipeline.stages.values():
            arguments = inspect.signature(stage.forward).parameters
            if "scores" not in arguments and not any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
                raise UserError(
                    f"{type(stage).__name__}.forward has no argument scores; expected a decoder of d9d_modules, or a "
                    "model with this argument. Pass score(batches, read=...), which reads values per token from the "
                    "model's outputs."
                )
