"""Training job: `build_job` builds the parts of its plan, `run_job` runs its steps.

Between `plan_job` and `build_job`, the caller starts the process group and locks the run folder, as `Trainer` does.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from d9d_dist import DistributedContext, UserError, seed_everything
from d9d_loop.data import Share, StreamLoader
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.engine.engine import BadStepError, Engine
from d9d_loop.engine.train_step import StepResult
from d9d_loop.event_bus import Events
from d9d_loop.events import (
    BadStepFound,
    CheckpointStarted,
    DataReady,
    EvaluationDone,
    EvaluationStarted,
    Finished,
    ModelExported,
    ModelReady,
    OptimizerReady,
    StepDone,
    TrainResult,
)
from d9d_loop.isolated_random import isolated_random
from d9d_loop.job.evaluation import Evaluator
from d9d_loop.job.garbage import GarbageCollection
from d9d_loop.job.job_state import JobState, Record
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.profiler import Profiler
from d9d_loop.job.reports import Reports
from d9d_loop.job.schedule_pictures import draw_measured, draw_program
from d9d_loop.lr import draw_lr_schedule
from d9d_loop.model.model_build import build_pipeline
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
from d9d_loop.task import Loss, LossFunction, Task
from d9d_metrics import Metric, redact_secrets
from d9d_state import CheckpointStore, save_model_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts of a training job on one rank, in the state of the newest checkpoint.

    Attributes:
        plan: Plan of the job.
        ctx: Distributed context.
        events: Event bus for the job's events.
        engine: Runs forward, backward and the optimizer step of the model.
        guard: Decides on bad steps.
        loss: Loss of a microbatch, which also updates the task's metrics.
        loader: Yields this rank's microbatches of each step, on its device.
        evaluate: Evaluates the model; `None` without evaluation data.
        state: Saves and restores model, optimizer, loader and guard.
        record: Progress of the job.
        reports: Passes values to trackers and the progress display.
        profiler: Profiles the configured steps.
        garbage: Collects Python's garbage at fixed steps.
        watchdog: Ends the job if a rank hangs.
        stop: Makes ranks agree on stop signals.
    """

    plan: JobPlan
    ctx: DistributedContext
    events: Events
    engine: Engine
    guard: StepGuard
    loss: LossFunction
    loader: StreamLoader
    evaluate: Evaluator | None
    state: JobState
    record: Record
    reports: Reports
    profiler: Profiler
    garbage: GarbageCollection
    watchdog: HangWatchdog
    stop: StopSignals


def build_job(plan: JobPlan, *, store: CheckpointStore, ctx: DistributedContext, events: Events) -> Job:
    """Build the parts of a job, and restore the newest checkpoint or load the initial weights. Collective.

    Emits `ModelReady` and `OptimizerReady`.

    Args:
        plan: Plan of the job.
        store: Checkpoint store of the run.
        ctx: Distributed context.
        events: Event bus for the job's events.

    Raises:
        UserError: If `parallelize` of the model provider does not fit the mesh, or the checkpoint does not fit the job.
        StateError: On every rank, if there are checkpoints, but none is valid.
    """
    config, task = plan.config, plan.task
    pipeline = build_pipeline(plan.model, ctx, progress=config.logging.progress)
    pipeline.set_grad_dtype(config.gradients.dtype)
    pipeline.reduces_each_microbatch = config.gradients.reduce_each_microbatch
    model = pipeline.model
    seed_everything(config.seed, ctx)
    optimizer = plan.optimizer(model)
    metrics = {name: metric.to(ctx.device) for name, metric in task.metrics().items()}
    loader = _build_loader(plan, ctx)
    guard = StepGuard(optimizer, config=config.resilience.bad_steps, ctx=ctx)
    state = JobState(
        store,
        model=model,
        optimizer=optimizer,
        metrics=metrics,
        parts={"data": loader, "bad_steps": guard},
        config=redact_secrets(plan.resolved),
        data_identity=plan.stream.identity(),
        seed=config.seed,
        ctx=ctx,
        events=events,
        trainable_only=config.checkpoint.trainable_only,
    )
    record = state.restore()
    pipeline.shared.copy_values()
    events.emit(ModelReady(record.step, model, ctx))
    events.emit(OptimizerReady(record.step, optimizer))
    engine = Engine(
        pipeline,
        optimizer,
        ctx=ctx,
        task=task,
        max_norm=config.gradients.max_norm,
        num_microbatches=plan.num_microbatches,
        guard=guard,
        polls_guard=False,
        events=events,
    )
    watchdog = HangWatchdog(ctx, enabled=config.resilience.watchdog.enabled)
    events.watch(watchdog.phase)
    stop = config.resilience.stop
    return Job(
        plan=plan,
        ctx=ctx,
        events=events,
        engine=engine,
        guard=guard,
        loss=partial(_loss, task, metrics),
        loader=loader,
        evaluate=_build_evaluator(plan, engine),
        state=state,
        record=record,
        reports=Reports(
            config,
            plan.resolved,
            num_steps=plan.steps,
            record=record,
            metrics=metrics,
            weight_unit=task.weight_unit,
            ctx=ctx,
        ),
        profiler=Profiler(config.profile, config.run.dir, ctx, num_steps=plan.steps),
        garbage=GarbageCollection(config.host.collect_garbage_every),
        watchdog=watchdog,
        stop=StopSignals(ctx, signals=stop.numbers, every=stop.every, grace=stop.grace, repeat=stop.repeat),
    )


def _loss(task: Task, metrics: Mapping[str, Metric], outputs: Any, batch: Any) -> Loss:
    """Compute the loss of a microbatch, and update the task's metrics."""
    loss = task.loss(outputs, batch)
    task.update_metrics(metrics, outputs=outputs, batch=batch, loss=loss)
    return loss


def _build_loader(plan: JobPlan, ctx: DistributedContext) -> StreamLoader:
    config = plan.config
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
        collate=plan.data.collate,
        place=BatchPlacement(plan.task, ctx),
        device=ctx.device,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        timeout=config.data.worker_timeout,
        draws=plan.data.draws,
    )


def _build_evaluator(plan: JobPlan, engine: Engine) -> Evaluator | None:
    if plan.evaluation_data is None:
        return None
    return Evaluator(
        engine.pipeline,
        plan.evaluation_data,
        task=plan.task,
        collate=plan.data.collate,
        num_samples=plan.config.evaluation.num_samples,
        batch_size=plan.microbatch_size,
        ctx=engine.ctx,
        seed=plan.config.seed,
    )


def run_job(job: Job) -> TrainResult | Stopped:
    """Run the remaining steps, and export the model. Return `Stopped` if a signal ended the job. Collective.

    Raises:
        BadStepError: On every rank, if a step was bad and the policy for bad steps is to stop.
    """
    plan, config, engine, record, events = job.plan, job.plan.config, job.engine, job.record, job.events
    engine.num_steps = record.step
    ready = DataReady(record.step, plan.num_microbatches, plan.microbatch_size)
    events.emit(ready)
    if job.ctx.is_main_process:
        _draw_plans(plan)
    with job.reports, job.loader, job.garbage, job.watchdog, job.stop, job.profiler:
        job.profiler.step(ready)
        batches: list[Any] = []
        while record.step < plan.steps:
            job.watchdog.beat(record.step + 1)
            before, batches = batches, next(job.loader)
            # Measure the second step: the first one compiles kernels and creates process groups.
            is_measured = config.pipeline.draw and plan.model.is_pipelined and record.step == ready.step + 1
            timeline = engine.accumulate(batches, job.loss, num_own=job.loader.num_own, measured=is_measured)
            engine.set_learning_rates(plan.lr_schedule(record.step))
            result = engine.step()
            record.step = engine.num_steps
            if record.step == ready.step + 1:
                _end_startup(job, result)
            if _apply_decisions(job, batches, before, settle=plan.is_saved_after(record.step)):
                continue  # rolled back to a checkpoint
            job.state.store.raise_if_failed()
            offload = partial(_offloaded, job)
            done = StepDone(record.step, result.loss, result.grad_norm, result.learning_rate, offload)
            events.emit(done)
            # Call these directly: the event bus saves and restores random and module states around each handler.
            job.profiler.step(done)
            job.garbage.collect(done)
            job.reports.step(result)
            if timeline is not None and job.ctx.is_main_process:
                with job.reports.not_training():
                    title = f"{type(plan.model.schedule).__name__}, step {record.step} as measured"
                    draw_measured(timeline, config.run.dir, title=title)
            is_last = record.step == plan.steps
            _check_updates(job, since=ready.step)
            is_evaluated = job.evaluate is not None and (is_last or record.step % config.evaluation.every == 0)
            if is_evaluated:
                _evaluate(job)
            every = config.resilience.replicas.every
            if every is not None and record.step % every == 0:
                with job.reports.not_training(), job.watchdog.phase("the replica check"):
                    check_replicas(job.engine.model, job.engine.optimizer, step=record.step, ctx=job.ctx)
            if plan.is_saved_after(record.step):
                background = config.checkpoint.background and not is_last
                _save(job, result, background=background, is_evaluated=is_evaluated)
            if (signal := job.stop.agreed()) is not None and not is_last:
                _save_to_leave(job, result, batches)
                job.stop.leave()
                return Stopped(signal, step=record.step)
        return _finish(job)


def evaluate_job(job: Job) -> TrainResult:
    """Evaluate a job's model in the state of its newest checkpoint, without a step. Collective.

    Trackers receive nothing, and nothing is exported.
    """
    config, record = job.plan.config, job.record
    assert job.evaluate is not None
    with job.loader, job.watchdog, job.watchdog.phase("an evaluation"), job.engine.evaluation_weights():
        record.evaluation = job.evaluate()
    return TrainResult(
        steps=record.step,
        train_loss=math.nan if record.train_loss is None else record.train_loss,
        evaluation=dict(record.evaluation),
        weight_per_second=record.weight_per_second or 0.0,
        run_dir=config.run.dir,
        export_dir=None,
    )


def _draw_plans(plan: JobPlan) -> None:
    """Draw the pipeline program and the learning-rate schedule in the run folder, if the configuration enables it."""
    config, folder = plan.config, plan.config.run.dir
    folder.mkdir(parents=True, exist_ok=True)
    if config.pipeline.draw and plan.model.is_pipelined:
        draw_program(plan.model.program, folder, title=type(plan.model.schedule).__name__)
    if config.logging.draw_lr_schedule:
        peak = config.optimizer.learning_rate
        draw_lr_schedule(plan.lr_schedule, folder, num_steps=plan.steps, peak=peak)


def _end_startup(job: Job, result: StepResult) -> None:
    """After the first step, check it, switch to the step timeout and prepare background saves. Collective."""
    if result.weight.item() == 0:
        raise UserError(
            f"the loss weight of step {job.record.step} is 0 over all samples, so there is no gradient; expected the "
            f"number of summed items. Check {type(job.plan.task).__name__}.loss, and whether all labels are masked."
        )
    check_buffers(job.engine.model, step=job.record.step, ctx=job.ctx)
    job.ctx.set_timeout(job.ctx.timeouts.step + job.watchdog.margin)
    if job.plan.config.checkpoint.background:
        job.state.prepare()


def _apply_decisions(job: Job, batches: list[Any], before: list[Any], *, settle: bool) -> bool:
    """Apply the decisions on bad steps that are known by now; return True if the job rolled back. Collective.

    `batches` and `before` are the microbatches of the last step and of the step before it. `settle` waits for the
    decision on the last step. Raises `BadStepError` on every rank if a decision is to stop.
    """
    while (bad := job.guard.poll(settle=settle)) is not None:
        why = bad.why
        if bad.kind == "non-finite":
            why += _origin_of(job, bad, batches if bad.step == job.record.step else before)
        job.events.emit(BadStepFound(bad.step, bad.kind, bad.decision, why))
        job.reports.progress.line(why)
        if bad.decision == "stop":
            raise BadStepError(why)
        if bad.decision == "rewind":
            _roll_back(job)
            return True
    return False


def _check_updates(job: Job, *, since: int) -> None:
    """After the last step, raise `BadStepError` on every rank if all updates since step `since` were skipped."""
    if job.record.step == job.plan.steps and not job.guard.has_applied:
        raise BadStepError(f"no update was applied in the steps {since + 1} to {job.record.step}: all were bad.")


def _origin_of(job: Job, bad: BadStep, batches: list[Any]) -> str:
    """Run a non-finite step again, and describe the first non-finite tensor. Collective."""
    with isolated_random(job.plan.config.seed, "replay", bad.step, device=True):
        found = find_non_finite(job.engine.model, partial(job.engine.replay, batches, job.loss), ctx=job.ctx)
    origin = f" {found}." if found else " In a second run of the step everything is finite."
    return origin + (" Another update was applied before the second run." if bad.step < job.record.step else "")


def _roll_back(job: Job) -> None:
    with job.watchdog.phase("the rollback to a checkpoint"):
        restored = job.state.rewind()
    job.guard.on_rollback()
    job.record.take(restored)
    job.engine.num_steps = restored.step
    job.engine.pipeline.shared.copy_values()
    job.reports.on_rollback()
    job.profiler.on_rollback(restored.step)


@contextmanager
def _offloaded(job: Job) -> Generator[None]:
    """Offload training state for the body, with the watchdog paused and the time excluded from the throughput."""
    unlimited = timedelta(days=365)
    with (
        job.reports.not_training(),
        job.watchdog.phase("offloading", timeout=unlimited),
        job.engine.offloaded(),
    ):
        yield


def _evaluate(job: Job) -> None:
    assert job.evaluate is not None
    record = job.record
    job.events.emit(EvaluationStarted(record.step))
    with job.reports.not_training(), job.watchdog.phase("an evaluation"), job.engine.evaluation_weights():
        record.evaluation = job.evaluate()
    job.reports.evaluation()
    # A copy, so that a handler cannot change the record.
    job.events.emit(EvaluationDone(record.step, dict(record.evaluation)))


def _save(job: Job, result: StepResult, *, background: bool, is_evaluated: bool = False) -> None:
    record = job.record
    job.reports.settle(result)
    job.events.emit(CheckpointStarted(record.step))
    metric = record.quality(job.plan.config.checkpoint.best_by) if is_evaluated else None
    with job.reports.not_training(), job.watchdog.phase("a save"):
        check_buffers(job.engine.model, step=record.step, ctx=job.ctx)
        job.state.save(record, metric=metric, background=background)


def _save_to_leave(job: Job, result: StepResult, batches: list[Any]) -> None:
    """Make sure that a checkpoint of the last step is complete before the job stops on a signal. Collective."""
    if _apply_decisions(job, batches, batches, settle=True):
        return  # rolled back to a checkpoint
    if not job.plan.is_saved_after(job.record.step):
        _save(job, result, background=False)
        return
    with job.watchdog.phase("a save"):
        job.state.finish()


def _finish(job: Job) -> TrainResult:
    """Export the model, and emit `Finished` with the result. Collective."""
    config, record, limit = job.plan.config, job.record, job.ctx.timeouts.startup
    # The export and the handlers of `Finished` may take longer than a step.
    job.ctx.set_timeout(limit + job.watchdog.margin)
    with job.watchdog.phase("the end of the job", timeout=limit), job.engine.evaluation_weights():
        export_dir = _export(job) if config.export else None
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
        job.events.emit(Finished(record.step, result, job.engine.model, job.engine.pipeline.callable(), job.ctx))
    return result


def _export(job: Job) -> Path:
    """Export the model, with the tokenizer and other files of the initial weights. Collective."""
    config, provider = job.plan.config, job.plan.model.provider
    folder = config.run.dir / "export"
    source = config.initial_weights or provider.initial_weights
    if source is not None and not source.is_dir():  # removed since the first start; an earlier export has the files
        if not folder.is_dir():
            job.reports.progress.line(
                f"the initial weights {source} no longer exist: their tokenizer and other files are not exported."
            )
        source = folder if folder.is_dir() else None
    with job.watchdog.phase("the export"):
        save_model_state(
            job.engine.model,
            folder,
            job.plan.export_mapper,
            job.ctx,
            extra_files=provider.export_files(),
            source=source,
            progress=config.logging.progress,
        )
    job.events.emit(ModelExported(job.plan.steps, folder))
    return folder
