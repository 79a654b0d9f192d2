from unittest import mock

import torch
from torch import nn

import d9d_loop.engine.pipeline
from d9d_dist import DistributedContext
from d9d_loop import Engine, Loss, Task
from d9d_loop.engine.pipeline import Pipeline
from d9d_pipeline import Executor, Inputs, Interleaved, build


class _Sum(Task):
    def inputs(self, batch: torch.Tensor) -> Inputs:
        return Inputs(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


def test_the_program_of_a_number_of_microbatches_is_built_once(ctx: DistributedContext) -> None:
    stages = {index: nn.Linear(3, 3) for index in range(2)}
    with (
        mock.patch.object(d9d_loop.engine.pipeline, "build", wraps=build) as built,
        mock.patch.object(d9d_loop.engine.pipeline, "Executor", wraps=Executor) as executors,
    ):
        pipeline = Pipeline(stages, ctx=ctx, schedule=Interleaved(2))
        optimizer, task = torch.optim.SGD(pipeline.model.parameters()), _Sum()
        engine = Engine(pipeline, optimizer, ctx=ctx, task=task, num_microbatches=4)
        for _ in range(2):
            for number in (4, 6, 1, 2):
                engine.forward_backward([torch.ones(2, 3)] * number, task.loss)
                assert engine.step().weight == 2 * number
    numbers = [call.kwargs["num_microbatches"] for call in built.mock_calls if isinstance(call.args[0], Interleaved)]
    assert sorted(numbers) == sorted(set(numbers))
    assert {4, 6, 1, 2} <= set(numbers)
    assert executors.call_count == 4
