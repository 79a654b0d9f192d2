"""The Trainer: one function that a newcomer reads top to bottom; each line is a part that also works without it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import DistributedContext, StageInfo, UserError, seed_everything
from d9d_loop.batch_placement import BatchPlacement
from d9d_loop.batches import Collate, Samples, TrainBatches, batch_loader
from d9d_loop.config import TrainerConfig
from d9d_loop.data_random import data_random
from d9d_loop.evaluation import Evaluator
from d9d_loop.event_bus import Events
from d9d_loop.events import (
    CheckpointSaved,
    CheckpointStarted,
    ConfigReady,
    DataReady,
    EvaluationDone,
    EvaluationStarted,
    Failed,
    Finished,
    ModelExported,
    ModelReady,
    OptimizerReady,
    StepDone,
)
from d9d_loop.garbage import GarbageCollection
from d9d_loop.job_state import JobState, Record
from d9d_loop.lr_schedule import LrSchedule
from d9d_loop.model_build import build_pipeline
from d9d_loop.model_provider import FunctionProvider, ModelProvider
from d9d_loop.optimizer import OptimizerProvider
from d9d_loop.pipeline import Pipeline
from d9d_loop.preflight import (
    JobPlan,
    check_job,
    check_metric_names,
    checkpoint_folder,
)
from d9d_loop.profiler import Profiler
from d9d_loop.reports import Reports
from d9d_loop.sample_order import SampleOrder
from d9d_loop.sleep import Sleep
from d9d_loop.task import Task
from d9d_loop.train_result import TrainResult
from d9d_loop.train_step import StepOutcome, TrainStep
from d9d_pipeline import Schedule
from d9d_state import CheckpointStore, load_model_state, save_model_state


class Trainer:
    """Trains a model. The same script runs as one process and under torchrun.

    Attributes:
        events: Subscribe to what happens: `trainer.events.on(StepDone, handler)`.

    Args:
        config: The job's configuration.
        model: Builds the model: a provider, or just the function that builds a pipeline stage of it.
        data: The training data.
        task: Makes inputs and losses.
        evaluation_data: Held-out data to evaluate on.
        collate: Makes a batch of a list of samples.
        optimizer: Builds the optimizer; by default, what the configuration says.
        lr_schedule: Factor of the peak learning rate by step; by default, what the configuration says.
        schedule: In which order pipeline ranks compute; by default, what the configuration says.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: ModelProvider | Callable[[StageInfo], nn.Module],
        data: Samples,
        task: Task,
        evaluation_data: Samples | None = None,
        collate: Collate = default_collate,
        optimizer: OptimizerProvider | None = None,
        lr_schedule: LrSchedule | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.events = Events(seed=config.seed)
        self._config = config
        self._provider = model if isinstance(model, ModelProvider) else FunctionProvider(model)
        self._data, self._evaluation_data, self._collate = data, evaluation_data, collate
        self._task = task
        self._optimizer = optimizer or config.optimizer.build
        self._lr_schedule = lr_schedule or config.lr_schedule.build(config.steps)
        self._schedule = schedule
        self._record = Record()

    def train(self) -> TrainResult:
        """Run the job to its end, from its newest checkpoint if it has one.

        Returns:
            What came of it; equal on every rank.

        Raises:
            UserError: If the job cannot be as it was asked for; before anything starts.
        """
        check_metric_names(self._task)
        plan = check_job(
            self._config,
            provider=self._provider,
            task=self._task,
            data=self._data,
            evaluation_data=self._evaluation_data,
            collate=self._collate,
            schedule=self._schedule,
        )
        with plan.mesh.build(launch=plan.launch) as ctx:
            try:
                return self._train(plan, ctx)
            except BaseException as error:
                if isinstance(error, UserError):
                    # From here on a rank may be alone with it: the note makes `command_line` print it there too.
                    error.add_note(f"on rank {ctx.rank}")
                self._tell_of_failure(error)
                raise

    def _tell_of_failure(self, error: BaseException) -> None:
        try:
            self.events.emit(Failed(self._record.step, error))
        except Exception as another:
            # Not in the place of what went wrong first.
            error.add_note(f"besides, {another!r} was " + "; ".join(getattr(another, "__notes__", ())))

    def _train(self, plan: JobPlan, ctx: DistributedContext) -> TrainResult:
        config = self._config
        ctx.check_agreement("the configuration", json.dumps(_resolved(config), sort_keys=True))
        self.events.emit(ConfigReady(0, _resolved(config), ctx))
        store = CheckpointStore(checkpoint_folder(config), retention=config.checkpoint.retention)
        # However the job ends, a checkpoint that is being written is finished before another job may take the folder.
        with store.locked(ctx), store:
            return self._train_in(store, plan, ctx)

    def _train_in(self, store: CheckpointStore, plan: JobPlan, ctx: DistributedContext) -> TrainResult:
        config, task, events = self._config, self._task, self.events
        pipeline = build_pipeline(self._provider, plan, ctx, seed=config.seed)
        model = pipeline.model
        seed_everything(config.seed, ctx)
        optimizer = self._optimizer(model)
        metrics = {name: metric.to(ctx.device) for name, metric in task.metrics().items()}
        state = JobState(
            store,
            model=model,
            optimizer=optimizer,
            metrics=metrics,
            config=_resolved(config),
            num_samples=len(self._data),
            seed=config.seed,
            ctx=ctx,
            on_saved=lambda step: events.emit(CheckpointSaved(step)),
        )
        record = self._record = state.restore()
        if record.step == 0 and config.initial_weights is not None:
            load_model_state(
                model,
                config.initial_weights,
                plan.mapper,
                unused="ignore" if len(plan.program.ranks) > 1 else "error",  # of a stage; the model was checked
                progress=config.logging.progress,
            )
        pipeline.shared.copy_values()
        events.emit(ModelReady(record.step, model, ctx))
        events.emit(OptimizerReady(record.step, optimizer))
        take_step = TrainStep(
            pipeline,
            optimizer,
            task=task,
            metrics=metrics,
            lr_schedule=self._lr_schedule,
            max_norm=config.gradients.max_norm,
            num_microbatches=plan.num_microbatches,
            ctx=ctx,
            events=events,
        )
        sleep = Sleep(model, optimizer, events=events)
        evaluate = self._evaluator(pipeline, plan, ctx)
        reports = Reports(
            config,
            _resolved(config),
            record=record,
            weight_unit=task.weight_unit,
            program=plan.program,
            schedule=type(plan.schedule).__name__,
            ctx=ctx,
        )
        garbage = GarbageCollection(config.host.collect_garbage_every)
        profiler = Profiler(config.profile, config.run.dir, ctx)
        with reports, garbage, profiler:
            first_step = record.step
            ready = DataReady(first_step, len(self._data), plan.num_microbatches, plan.microbatch_size)
            events.emit(ready)
            profiler.step(ready)
            for batches in self._steps(first_step, plan, ctx):
                # The second step: the first one makes kernels, process groups and shapes known.
                is_measured = len(plan.program.ranks) > 1 and record.step == first_step + 1
                outcome = take_step(record.step, batches, measured=is_measured)
                record.step += 1
                if record.step == first_step + 1:
                    # The first step makes kernels and process groups; from then on a rank that is late is lost.
                    ctx.set_timeout(ctx.timeouts.step)
                    if config.checkpoint.background:
                        state.prepare()
                state.raise_if_failed()
                done = _step_done(record, outcome, sleep)
                events.emit(done)
                # Not through the bus, whose care for what handlers do takes time.
                profiler.step(done)
                garbage.collect(done)
                reports.step(outcome, metrics)
                self._evaluate_and_save(record, outcome, evaluate=evaluate, reports=reports, state=state)
            export_dir = self._export(model, plan, ctx) if config.export else None
        assert record.train_loss is not None
        assert record.weight_per_second is not None
        result = TrainResult(
            steps=record.step,
            train_loss=record.train_loss,
            evaluation=record.evaluation,
            weight_per_second=record.weight_per_second,
            run_dir=config.run.dir,
            export_dir=export_dir,
        )
        self.events.emit(Finished(record.step, result, model, pipeline.callable(), ctx))
        return result

    def _evaluate_and_save(
        self, record: Record, outcome: StepOutcome, *, evaluate: Evaluator | None, reports: Reports, state: JobState
    ) -> None:
        """Do what is due after a step."""
        config = self._config
        is_last = record.step == config.steps
        is_evaluated = is_last or record.step % config.evaluation.every == 0
        if evaluate is not None and is_evaluated:
            self.events.emit(EvaluationStarted(record.step))
            with reports.not_training():
                record.evaluation = evaluate()
            reports.evaluation()
            self.events.emit(EvaluationDone(record.step, record.evaluation))
        if is_last or record.step % config.checkpoint.every == 0:
            reports.settle(outcome)
            self.events.emit(CheckpointStarted(record.step))
            with reports.not_training():
                state.save(
                    record,
                    metric=record.evaluation.get(config.checkpoint.best_by) if is_evaluated else None,
                    background=config.checkpoint.background and not is_last,
                )

    def _steps(self, first_step: int, plan: JobPlan, ctx: DistributedContext) -> Iterator[list[Any]]:
        """The microbatches of this rank, for one step after the other."""
        config = self._config
        batches = TrainBatches(
            SampleOrder(len(self._data), seed=config.seed, shuffle=config.data.shuffle),
            first_step=first_step,
            num_steps=config.steps,
            num_microbatches=plan.num_microbatches,
            microbatch_size=plan.microbatch_size,
            dp_rank=ctx.coordinate("batch", "dp"),
            dp_size=plan.dp_size,
        )
        loader = batch_loader(
            self._data,
            batches,
            collate=self._collate,
            num_workers=config.data.num_workers,
            pin_memory=ctx.device.type != "cpu",
        )
        placed = map(BatchPlacement(self._task, ctx), loader)
        dp_rank = ctx.coordinate("batch", "dp")
        for step in range(first_step, config.steps):
            with data_random(config.seed, step=step, dp_rank=dp_rank):
                microbatches = list(islice(placed, plan.num_microbatches))
            yield microbatches

    def _evaluator(self, pipeline: Pipeline, plan: JobPlan, ctx: DistributedContext) -> Evaluator | None:
        if self._evaluation_data is None:
            return None
        return Evaluator(
            pipeline,
            self._evaluation_data,
            task=self._task,
            collate=self._collate,
            num_samples=self._config.evaluation.num_samples,
            batch_size=plan.microbatch_size,
            ctx=ctx,
        )

    def _export(self, model: nn.Module, plan: JobPlan, ctx: DistributedContext) -> Path:
        config = self._config
        folder = config.run.dir / "export"
        save_model_state(
            model,
            folder,
            plan.mapper and plan.mapper.inverse(),
            ctx,
            extra_files=self._provider.export_files(),
            progress=config.logging.progress,
        )
        self.events.emit(ModelExported(config.steps, folder))
        return folder


def _step_done(record: Record, outcome: StepOutcome, sleep: Sleep) -> StepDone:
    loss, grad_norm = outcome.loss, outcome.grad_norm
    return StepDone(record.step, loss, grad_norm, outcome.learning_rate, partial(sleep, record.step))


def _resolved(config: TrainerConfig) -> dict[str, JsonValue]:
    return config.model_dump(mode="json")
