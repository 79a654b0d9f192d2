"""Evaluation of the loss and the task's metrics on held-out data, without side effects on training."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from d9d_dist import DistributedContext
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.data.batches import Collate, EvaluationBatches, Samples, batch_loader
from d9d_loop.data.data_random import position_random
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.task import Task, to_inputs
from d9d_metrics import WeightedMean, compute_metrics
from d9d_pipeline import Executor
from d9d_state import rng_state, set_rng_state


class Evaluator:
    """Evaluates a model on evenly spaced samples of a dataset. The result does not depend on the number of ranks.

    Args:
        model: The model that is trained, or the pipeline of its stages.
        samples: Evaluation dataset.
        task: Provides model inputs, losses and metrics.
        collate: Builds a batch from a list of samples.
        num_samples: Number of samples to use; all if `None`.
        batch_size: Number of samples of a forward pass on one rank.
        ctx: Distributed context of the job.
        seed: Seed of the random numbers that the dataset and `collate` draw.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        samples: Samples,
        *,
        task: Task,
        collate: Collate,
        num_samples: int | None,
        batch_size: int,
        ctx: DistributedContext,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._pipeline = model if isinstance(model, Pipeline) else Pipeline({0: model}, ctx=ctx)
        self._samples, self._task, self._collate = samples, task, collate
        self._batches = EvaluationBatches(
            data_size=len(samples),
            num_samples=len(samples) if num_samples is None else min(num_samples, len(samples)),
            batch_size=batch_size,
            dp_rank=ctx.coordinate("batch", "dp"),
            dp_size=ctx.size("batch", "dp"),
        )
        # Microbatches of one executor step; twice the number of pipeline ranks keeps the bubble small.
        self._batches_at_a_time = 2 * ctx.size("batch", "pp") if ctx.size("batch", "pp") > 1 else 1
        self._executors: dict[int, Executor] = {}
        self._place = BatchPlacement(task, ctx)
        self._ctx = ctx

    def __call__(self) -> dict[str, float]:
        """Run one evaluation. Collective over all ranks.

        The model runs in evaluation mode without gradients. Modes and random states are restored afterwards.

        Returns:
            `loss`, the weighted mean over all samples, and the task's metrics; equal on every rank.
        """
        metrics = {name: metric.to(self._ctx.device) for name, metric in self._task.metrics().items()}
        mean_loss = WeightedMean().to(self._ctx.device)

        def take_loss(outputs: Any, number: int, batch: Any) -> None:
            if number >= self._batches.num_real:
                return
            loss = self._task.loss(outputs, batch)
            mean_loss.update(loss.total, loss.weight)
            self._task.update_metrics(metrics, outputs=outputs, batch=batch, loss=loss)

        with _without_trace(self._pipeline.model):
            numbered = enumerate(self._loader())
            while batches := list(islice(numbered, self._batches_at_a_time)):
                inputs = [to_inputs(self._task.inputs(batch)) for _, batch in batches]
                self._executor(len(batches)).step(
                    inputs, lambda outputs, index, batches=batches: take_loss(outputs, *batches[index])
                )
        return compute_metrics({"loss": mean_loss, **metrics}, self._ctx.group_for("batch", "pp", "dp", "cp"))

    def _executor(self, num_microbatches: int) -> Executor:
        if num_microbatches not in self._executors:
            self._executors[num_microbatches] = self._pipeline.evaluation(num_microbatches)
        return self._executors[num_microbatches]

    def _loader(self) -> Iterator[Any]:
        pin_memory = self._ctx.device.type != "cpu"
        loader = iter(
            batch_loader(self._samples, self._batches, collate=self._collate, num_workers=0, pin_memory=pin_memory)
        )
        for indices in self._batches:
            # Ranks that read the same samples must draw the same random numbers.
            with position_random(self._seed, position=indices[0]):
                batch = next(loader)
            yield self._place(batch)


@contextmanager
def _without_trace(model: nn.Module) -> Generator[None]:
    """Switch to evaluation mode without gradients; restore the modules' modes and the random states on exit."""
    state = rng_state()
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        set_rng_state(state)
