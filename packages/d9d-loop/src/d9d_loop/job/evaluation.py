"""Evaluation of the loss and the task's metrics on held-out data, without side effects on training."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError
from d9d_loop.data.batch_reader import BatchReader
from d9d_loop.data.indexed_stream import held_out_stream
from d9d_loop.data.sample_stream import Collate, Samples, SampleStream
from d9d_loop.data.stream_loader import Share, plan_steps
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.reference import FrozenReference
from d9d_loop.engine.scores import reference_values
from d9d_loop.isolation import evaluation_mode, seed_generators
from d9d_loop.job.predictions import ComputeMetrics, Predictions
from d9d_loop.task import BatchPlacement, Task, measured_loss
from d9d_metrics import WeightedMean, compute_metrics
from d9d_pipeline import Inputs


class Evaluator:
    """Evaluation of a model on held-out samples. The result does not depend on the number of ranks.

    Args:
        model: The model that is trained, or the pipeline of its stages.
        samples: Evaluation dataset, or a stream of samples.
        num_samples: Number of samples to use: pseudorandom ones of a dataset, or the first ones of a stream. `None`
            uses all samples of a dataset or of a finite stream.
        batch_size: Number of samples of a forward pass on one rank.
        seed: Seed of the random numbers that the dataset, `collate`, the task and the model draw.
        compute: Function of all predictions of the task that returns more values; `None` for none.
        reference: Context in which the model acts as its reference, whose values the batches get; `None` for none.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        samples: Samples | SampleStream,
        *,
        task: Task,
        collate: Collate,
        num_samples: int | None,
        batch_size: int,
        ctx: DistributedContext,
        seed: int = 0,
        compute: ComputeMetrics | None = None,
        reference: FrozenReference | None = None,
    ) -> None:
        self._seed, self._task, self._ctx, self._compute, self._reference = seed, task, ctx, compute, reference
        self._pipeline = model if isinstance(model, Pipeline) else Pipeline({0: model}, ctx=ctx)
        self._stream, self._collate = held_out_stream(samples, num_samples), collate
        share = Share(batch_size, dp_rank=ctx.coordinate("batch", "dp"), dp_size=ctx.size("batch", "dp"))
        steps = plan_steps(self._stream.cursor(), share, num_samples=num_samples)
        batches = [(job, num_own == 0) for (job,), num_own, _ in steps]
        if not batches:
            raise UserError("the evaluation data are empty; expected at least one sample. Check the path of the data.")
        self._jobs, self._is_stand_in = zip(*batches, strict=True)
        self._place = BatchPlacement(task, ctx)

    def __call__(self) -> dict[str, float]:
        """Return the loss and the task's metrics, equal on every rank. Collective over all ranks.

        The model runs in evaluation mode without gradients. Module modes and random states are restored
        afterwards. `loss` is the weighted mean over all samples. Random numbers that the task or the model draws for a
        batch are a function of the seed and of the position of its first sample, so each evaluation draws the same.
        """
        metrics = {name: metric.to(self._ctx.device) for name, metric in self._task.metrics().items()}
        mean_loss = WeightedMean().to(self._ctx.device)

        of_reference = self._reference_values()
        predictions = Predictions(self._task, self._ctx, has_outputs=self._pipeline.has_last_stage)

        def take(outputs: Any, index: int, batch: Any) -> None:
            batch = {**batch, **of_reference[index]} if index in of_reference else batch
            is_padding = self._is_stand_in[index]
            if self._compute is not None:
                predictions.add(outputs, batch, is_padding=is_padding)
            if not is_padding:
                seed_generators(self._seed, "evaluation loss", self._jobs[index].position, device=True)
                loss = measured_loss(self._task, metrics, outputs, batch)
                mean_loss.update(loss.total, loss.weight)

        with ExitStack() if self._compute is None else predictions:
            with evaluation_mode(self._pipeline.model), closing(self._batches()) as batches:
                self._pipeline.forward(batches, len(self._jobs), inputs=self._seeded_inputs(), on_output=take)
            values = compute_metrics({"loss": mean_loss, **metrics}, self._ctx.group_for("batch", "pp", "dp", "cp"))
            computed = {} if self._compute is None else predictions.compute(self._compute)
        if taken := sorted(values.keys() & computed.keys()):
            raise UserError(
                f"compute_metrics returned {', '.join(taken)}, which the evaluation measures itself; expected other "
                "names. Rename the values."
            )
        return {**values, **computed}

    def _batches(self) -> BatchReader:
        place, device = self._place, self._ctx.device
        jobs = iter(self._jobs)
        return BatchReader(self._stream, self._collate, jobs, seed=self._seed, place=place, device=device)

    def _seeded_inputs(self) -> Callable[[Any], Inputs]:
        positions = (job.position for job in self._jobs)

        def inputs(batch: Any) -> Inputs:
            seed_generators(self._seed, "evaluation input", next(positions), device=True)
            return self._pipeline.inputs_of(self._task, batch)

        return inputs

    def _reference_values(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the values of the reference by batch index, from a separate pass over the data. Collective."""
        if self._reference is None:
            return {}
        with self._reference(), closing(self._batches()) as batches:
            options: dict[str, Any] = {"task": self._task, "inputs": self._seeded_inputs()}
            return reference_values(batches, len(self._jobs), pipeline=self._pipeline, **options)
