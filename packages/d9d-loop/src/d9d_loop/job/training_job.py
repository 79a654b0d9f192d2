"""The training loop: builds the components of a job and runs its steps."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import nn

from d9d_dist import DistributedContext, seed_everything
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data import DataProvider, Share, StreamLoader
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.event_bus import Events
from d9d_loop.events import (
    BadStepFound,
    CheckpointSaved,
    CheckpointStarted,
    DataReady,
    EvaluationDone,
    EvaluationStarted,
    Finished,
    ModelExported,
    ModelReady,
    OptimizerReady,
    StepDone,
)
from d9d_loop.job.evaluation import Evaluator
from d9d_loop.job.garbage import GarbageCollection
from d9d_loop.job.job_state import JobState
from d9d_loop.job.own_random import own_random
from d9d_loop.job.preflight import JobPlan
from d9d_loop.job.profiler import Profiler
from d9d_loop.job.reports import Reports
from d9d_loop.job.sleep import Sleep
from d9d_loop.job.train_result import TrainResult
from d9d_loop.job.train_step import StepOutcome, TrainStep
from d9d_loop.lr.lr_schedule import LrSchedule
from d9d_loop.model.model_build import build_pipeline
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.optimizers import evaluation_weights
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.resilience import (
    BadStep,
    HangWatchdog,
    StepGuard,
    Stopped,
    StopSignals,
    check_buffers,
    check_replicas,
    find_non_finite,
)
from d9d_loop.task import Task
from d9d_metrics import redact_secrets
from d9d_state import CheckpointStore, load_model_state, save_model_state


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """Components of a training job that the user provides.

    Attributes:
        model: Builds the model.
        data: Provides training and evaluation data.
        task: Prepares inputs and computes the loss.
        optimizer: Builds the optimizer.
        lr_schedule: Function from the step to the factor of the peak learning rate.
    """

    model: ModelProvider
    data: DataProvider
    task: Task
    optimizer: OptimizerProvider
    lr_schedule: LrSchedule


class BadStepError(RuntimeError):
    """A step was non-finite or a loss spike, and the policy for bad steps ends the job. Raised on all ranks."""


@final
class TrainingJob:
    """Builds the components of a job, restores the newest checkpoint, and runs the steps.

    The constructor is collective.

    Args:
        config: The job's configuration.
        parts: Components that the user provides.
        plan: Checked plan of the job.
        store: Checkpoint store of the run.
        ctx: Distributed context.
        events: Event bus for the job's events.
    """

    def __init__(
        self,
        config: TrainerConfig,
        parts: JobParts,
        *,
        plan: JobPlan,
        store: CheckpointStore,
        ctx: DistributedContext,
        events: Events,
    ) -> None:
        self._config, self._parts, self._plan = config, parts, plan
        self._ctx, self._events = ctx, events
        resolved = config.model_dump(mode="json")
        self._pipeline = pipeline = build_pipeline(parts.model, plan, ctx, seed=config.seed)
        self._model = model = pipeline.model
        seed_everything(config.seed, ctx)
        self._optimizer = parts.optimizer(model)
        self._metrics = {name: metric.to(ctx.device) for name, metric in parts.task.metrics().items()}
        self._loader = self._data_loader()
        self._guard = StepGuard(self._optimizer, config=config.resilience.bad_steps, ctx=ctx)
        self._state = JobState(
            store,
            model=model,
            optimizer=self._optimizer,
            metrics=self._metrics,
            parts={"data": self._loader, "bad_steps": self._guard},
            config=redact_secrets(resolved),
            data_identity=plan.stream.identity(),
            seed=config.seed,
            ctx=ctx,
            trainable_only=config.checkpoint.trainable_only,
            on_saved=lambda step: events.emit(CheckpointSaved(step)),
        )
        self._record = record = self._state.restore(self._load_initial_weights)
        pipeline.shared.copy_values()
        events.emit(ModelReady(record.step, model, ctx))
        events.emit(OptimizerReady(record.step, self._optimizer))
        self._take_step = TrainStep(
            pipeline,
            self._optimizer,
            task=parts.task,
            metrics=self._metrics,
            lr_schedule=parts.lr_schedule,
            max_norm=config.gradients.max_norm,
            num_microbatches=plan.num_microbatches,
            ctx=ctx,
            events=events,
            guard=self._guard,
        )
        self._evaluate = self._evaluator()
        self._sleep = Sleep(nn.ModuleList(pipeline.stages.values()), self._optimizer, events=events)
        self._reports = Reports(
            config,
            resolved,
            record=record,
            metrics=self._metrics,
            weight_unit=parts.task.weight_unit,
            program=plan.program,
            schedule=type(plan.schedule).__name__,
            lr_schedule=parts.lr_schedule,
            ctx=ctx,
        )
        self._garbage = GarbageCollection(config.host.collect_garbage_every)
        self._profiler = Profiler(config.profile, config.run.dir, ctx, num_steps=config.steps)
        self._watchdog = HangWatchdog(ctx, enabled=config.resilience.watchdog.enabled)
        events.watch(self._watchdog.phase)
        stop = config.resilience.stop
        self._stop = StopSignals(ctx, signals=stop.numbers, every=stop.every, grace=stop.grace, repeat=stop.repeat)

    def _load_initial_weights(self) -> None:
        if self._plan.weights is not None:
            load_model_state(
                self._model,
                self._plan.weights,
                self._plan.load_mapper,
                unused="ignore" if len(self._plan.program.ranks) > 1 else "error",  # weights of other stages are unused
                progress=self._config.logging.progress,
            )

    def run(self, *, on_step: Callable[[int], None]) -> TrainResult | Stopped:
        """Run the remaining steps. Collective.

        Args:
            on_step: Called with the number of completed steps, at the start and after each step.

        Returns:
            The result, or `Stopped` if a signal ended the job.

        Raises:
            BadStepError: On every rank, if a step was bad and the policy for bad steps is to stop.
        """
        config, plan, record = self._config, self._plan, self._record
        on_step(record.step)
        first_step = record.step
        draws_pipeline = config.pipeline.draw and len(plan.program.ranks) > 1
        ready = DataReady(first_step, plan.num_microbatches, plan.microbatch_size)
        self._events.emit(ready)
        with self._reports, self._loader, self._garbage, self._watchdog, self._stop, self._profiler:
            self._profiler.step(ready)
            batches: list[Any] = []
            while record.step < config.steps:
                self._watchdog.beat(record.step + 1)
                before, batches = batches, next(self._loader)
                # The second step is measured: the first one compiles kernels and creates process groups.
                is_measured = draws_pipeline and record.step == first_step + 1
                outcome = self._take_step(record.step, batches, measured=is_measured)
                record.step += 1
                on_step(record.step)
                if record.step == first_step + 1:
                    self._end_startup()
                if self._heed_bad_steps(batches, before, settle=self._is_saved_after(record.step)):
                    continue
                self._after_step(outcome)
                if (signal := self._stop.agreed()) is not None and record.step < config.steps:
                    self._save_to_leave(outcome, batches)
                    self._stop.leave()
                    return Stopped(signal, step=record.step)
            return self._finish()

    def _end_startup(self) -> None:
        """Switch from the start-up timeout to the step timeout after the first step. Collective.

        The first step takes longer because it compiles kernels and creates process groups. Persistent buffers are
        checked for equality between ranks, and the host buffer of background saves is allocated.
        """
        check_buffers(self._model, step=self._record.step, ctx=self._ctx)
        self._ctx.set_timeout(self._ctx.timeouts.step + self._watchdog.margin)
        if self._config.checkpoint.background:
            self._state.prepare()

    def _heed_bad_steps(self, batches: list[Any], before: list[Any], *, settle: bool) -> bool:
        """Apply the decisions on bad steps that are known by now.

        Args:
            batches: This rank's microbatches of the last step.
            before: This rank's microbatches of the step before it.
            settle: Whether to wait for the decision on the last step.

        Returns:
            True if the job rolled back to a checkpoint.

        Raises:
            BadStepError: On every rank, if a decision is to stop.
        """
        while (bad := self._guard.poll(settle=settle)) is not None:
            if self._heed(bad, batches if bad.step == self._record.step else before):
                return True
        return False

    def _heed(self, bad: BadStep, batches: list[Any]) -> bool:
        """Apply the decision on a bad step, which is equal on every rank. Collective.

        A non-finite step is replayed to find the origin of the non-finite values.

        Args:
            bad: The bad step.
            batches: This rank's microbatches of that step.

        Returns:
            True if the job rolled back to a checkpoint.

        Raises:
            BadStepError: On every rank, if the decision is to stop.
        """
        why = bad.why
        if bad.kind == "non-finite":
            with own_random(self._config.seed, "replay", bad.step, device=True):
                found = find_non_finite(self._model, partial(self._take_step.replay, batches), ctx=self._ctx)
            why += f" {found}." if found else " In a second run of the step everything is finite."
            if bad.step < self._record.step:
                why += " Another update was applied before the second run."
        self._events.emit(BadStepFound(bad.step, bad.kind, bad.decision, why))
        self._reports.line(why)
        if bad.decision == "stop":
            raise BadStepError(why)
        if bad.decision != "rewind":
            return False
        with self._watchdog.phase("the rollback to a checkpoint"):
            restored = self._state.rewind()
        self._guard.on_rollback()
        self._record.take(restored)
        self._pipeline.shared.copy_values()
        self._reports.on_rollback()
        self._profiler.on_rollback(restored.step)
        return True

    def _after_step(self, outcome: StepOutcome) -> None:
        """Emit `StepDone`, report the step, and run the evaluation, replica check and save that are due. Collective."""
        config, record = self._config, self._record
        self._state.raise_if_failed()
        done = StepDone(
            record.step,
            outcome.loss,
            outcome.grad_norm,
            outcome.learning_rate,
            asleep=self._asleep,
        )
        self._events.emit(done)
        # Called directly: the event bus saves and restores random and module states around each handler.
        self._profiler.step(done)
        self._garbage.collect(done)
        self._reports.step(outcome)
        is_last = record.step == config.steps
        is_evaluated = self._evaluate is not None and (is_last or record.step % config.evaluation.every == 0)
        if is_evaluated:
            self._run_evaluation()
        every = config.resilience.replicas.every
        if every is not None and record.step % every == 0:
            with self._reports.not_training(), self._watchdog.phase("the replica check"):
                check_replicas(self._model, self._optimizer, step=record.step, ctx=self._ctx)
        if self._is_saved_after(record.step):
            self._save(outcome, background=config.checkpoint.background and not is_last, is_evaluated=is_evaluated)

    @contextmanager
    def _asleep(self) -> Generator[None]:
        """Offload training state for the body: pause the watchdog, and exclude the time from the throughput."""
        unlimited = timedelta(days=365)
        with (
            self._reports.not_training(),
            self._watchdog.phase("sleep", timeout=unlimited),
            self._sleep(self._record.step),
        ):
            yield

    def _is_saved_after(self, step: int) -> bool:
        return step == self._config.steps or step % self._config.checkpoint.every == 0

    def _run_evaluation(self) -> None:
        assert self._evaluate is not None
        record = self._record
        self._events.emit(EvaluationStarted(record.step))
        with self._reports.not_training(), self._watchdog.phase("an evaluation"), self._result_in_place():
            record.evaluation = self._evaluate()
        self._reports.evaluation()
        # A copy, so that a handler cannot change the record.
        self._events.emit(EvaluationDone(record.step, dict(record.evaluation)))

    def _save(self, outcome: StepOutcome, *, background: bool, is_evaluated: bool = False) -> None:
        self._reports.settle(outcome)
        self._events.emit(CheckpointStarted(self._record.step))
        metric = self._record.quality(self._config.checkpoint.best_by) if is_evaluated else None
        with self._reports.not_training(), self._watchdog.phase("a save"):
            check_buffers(self._model, step=self._record.step, ctx=self._ctx)
            self._state.save(self._record, metric=metric, background=background)

    def _save_to_leave(self, outcome: StepOutcome, batches: list[Any]) -> None:
        """Make sure that a checkpoint of the last step is complete before the job stops on a signal. Collective.

        If the step was just saved, wait for that save instead of saving again. If a bad step causes a rollback, the
        job already has a checkpoint of its step.
        """
        if self._heed_bad_steps(batches, batches, settle=True):
            return  # rolled back to a checkpoint
        with self._watchdog.phase("a save"):
            if self._is_saved_after(self._record.step):
                self._state.finish()
                return
        self._save(outcome, background=False)

    def _finish(self) -> TrainResult:
        config, record, limit = self._config, self._record, self._ctx.timeouts.startup
        # All steps are saved. The export and the handlers of `Finished` may take longer than a step.
        self._ctx.set_timeout(limit + self._watchdog.margin)
        with self._watchdog.phase("the end of the job", timeout=limit), self._result_in_place():
            export_dir = self._export() if config.export else None
            assert record.train_loss is not None
            assert record.weight_per_second is not None
            result = TrainResult(
                steps=record.step,
                train_loss=record.train_loss,
                evaluation=dict(record.evaluation),
                weight_per_second=record.weight_per_second,
                run_dir=config.run.dir,
                export_dir=export_dir,
            )
            self._events.emit(Finished(record.step, result, self._model, self._pipeline.callable(), self._ctx))
        return result

    @contextmanager
    def _result_in_place(self) -> Generator[None]:
        """Swap in the evaluation weights for the body. They differ from the training weights if the optimizer averages.

        Collective over the pipeline: shared parameters are copied from the owning stage, before and after the body.
        """
        with evaluation_weights(self._model, self._optimizer):
            self._pipeline.shared.copy_values()
            yield
        self._pipeline.shared.copy_values()

    def _data_loader(self) -> StreamLoader:
        config, plan, ctx = self._config, self._plan, self._ctx
        share = Share(
            plan.microbatch_size,
            plan.num_microbatches,
            dp_rank=ctx.coordinate("batch", "dp"),
            dp_size=ctx.size("batch", "dp"),
        )
        return StreamLoader(
            plan.stream,
            share,
            seed=config.seed,
            collate=self._parts.data.collate,
            place=BatchPlacement(self._parts.task, ctx),
            device=ctx.device,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
            timeout=config.data.worker_timeout,
            draws=self._parts.data.draws,
        )

    def _evaluator(self) -> Evaluator | None:
        samples = self._plan.evaluation_data
        if samples is None:
            return None
        return Evaluator(
            self._pipeline,
            samples,
            task=self._parts.task,
            collate=self._parts.data.collate,
            num_samples=self._config.evaluation.num_samples,
            batch_size=self._plan.microbatch_size,
            ctx=self._ctx,
            seed=self._config.seed,
        )

    def _export(self) -> Path:
        folder = self._config.run.dir / "export"
        with self._watchdog.phase("the export"):
            save_model_state(
                self._model,
                folder,
                self._plan.export_mapper,
                self._ctx,
                extra_files=self._parts.model.export_files(),
                source=self._source(folder),
                progress=self._config.logging.progress,
            )
        self._events.emit(ModelExported(self._config.steps, folder))
        return folder

    def _source(self, earlier: Path) -> Path | None:
        """Return the folder whose tokenizer and other files are copied to the export; `None` if there is none.

        It is the folder of the initial weights. If that no longer exists, as may happen after a resume, it is an
        earlier export.

        Args:
            earlier: Folder of an earlier export, which may not exist.
        """
        folder = self._config.initial_weights or self._parts.model.initial_weights
        if folder is None or folder.is_dir():
            return folder
        if earlier.is_dir():
            return earlier
        self._reports.line(
            f"the initial weights {folder} no longer exist: their tokenizer and other files are not exported."
        )
        return None
