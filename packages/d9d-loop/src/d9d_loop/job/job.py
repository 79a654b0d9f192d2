"""Training job: `build_job` builds the parts of its plan, `run_job` runs its steps.

Between `plan_job` and `build_job`, the caller starts the process group and locks the run folder, as `Trainer` does.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from torch.optim import Optimizer

from d9d_dist import DistributedContext, UserError, seed_everything
from d9d_loop.data import Share, StreamLoader
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.engine.engine import Engine
from d9d_loop.engine.train_step import StepResult
from d9d_loop.evaluation_mode import evaluation_mode
from d9d_loop.event_bus import Events
from d9d_loop.events import (
    CheckpointStarted,
    DataReady,
    EvaluationDone,
    EvaluationStarted,
    ModelReady,
    OptimizerReady,
    StepDone,
    TrainResult,
)
from d9d_loop.job.bad_step_decisions import apply_decisions, check_updates
from d9d_loop.job.evaluation import Evaluator
from d9d_loop.job.garbage import GarbageCollection
from d9d_loop.job.job_end import finish_job, train_result
from d9d_loop.job.job_parts import Job
from d9d_loop.job.job_state import JobState, Record
from d9d_loop.job.journal import Journal
from d9d_loop.job.pipeline import Pipeline
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.profiler import Profiler
from d9d_loop.job.reports import Reports
from d9d_loop.job.schedule_pictures import draw_measured, draw_program
from d9d_loop.job.start_files import write_config, writes_together
from d9d_loop.lr import draw_lr_schedule
from d9d_loop.model.compiled_model import compile_stages, describe_graph_breaks
from d9d_loop.model.model_build import build_pipeline
from d9d_loop.resilience import (
    HangWatchdog,
    StepGuard,
    Stopped,
    StopSignals,
    StragglerWatch,
    check_buffers,
    check_replicas,
)
from d9d_loop.task import Loss, Task
from d9d_metrics import Metric, redact_secrets
from d9d_state import CheckpointStore


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
    pipeline.set_gradients(config.gradients)
    if config.compile is not None:
        compile_stages(pipeline.stages.values(), config.compile)
    seed_everything(config.seed, ctx)
    optimizer = plan.optimizer(pipeline.model)
    metrics = {name: metric.to(ctx.device) for name, metric in task.metrics().items()}
    loader = _build_loader(plan, ctx)
    guard = StepGuard(optimizer, config=config.resilience.bad_steps, ctx=ctx)
    state = JobState(
        store,
        model=pipeline.model,
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
    events.emit(ModelReady(record.step, pipeline.model, ctx))
    events.emit(OptimizerReady(record.step, optimizer))
    engine = build_engine(plan, pipeline, optimizer, ctx=ctx, guard=guard, events=events)
    journal = Journal(config.run.dir, ctx)
    watchdog = HangWatchdog(ctx, enabled=config.resilience.watchdog.enabled, on_exit=journal.failed)
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
        reports=_build_reports(plan, record, metrics, ctx),
        profiler=Profiler(config.profile, config.run.dir, ctx, num_steps=plan.steps),
        journal=journal,
        garbage=GarbageCollection(config.host.collect_garbage_every),
        watchdog=watchdog,
        stop=StopSignals(ctx, signals=stop.numbers, every=stop.every, grace=stop.grace, repeat=stop.repeat),
        stragglers=StragglerWatch(config.resilience.health, ctx),
    )


def build_engine(
    plan: JobPlan,
    pipeline: Pipeline,
    optimizer: Optimizer,
    *,
    ctx: DistributedContext,
    guard: StepGuard,
    events: Events | None = None,
) -> Engine:
    """Build the engine of a job. The caller acts on the decisions on bad steps. Collective."""
    return Engine(
        pipeline,
        optimizer,
        ctx=ctx,
        task=plan.task,
        max_norm=plan.config.gradients.max_norm,
        num_microbatches=plan.num_microbatches,
        guard=guard,
        polls_guard=False,
        events=events,
    )


def _build_reports(plan: JobPlan, record: Record, metrics: Mapping[str, Metric], ctx: DistributedContext) -> Reports:
    return Reports(
        plan.config,
        plan.resolved,
        num_steps=plan.steps,
        record=record,
        metrics=metrics,
        weight_unit=plan.task.weight_unit,
        ctx=ctx,
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
    """Run the remaining steps, and export the model. Return `Stopped` if a signal or a slow host ended the job.

    Collective.

    Raises:
        BadStepError: On every rank, if a step was bad and the policy for bad steps is to stop.
    """
    plan, config, engine, record, events = job.plan, job.plan.config, job.engine, job.record, job.events
    engine.num_steps = record.step
    ready = DataReady(record.step, plan.num_microbatches, plan.microbatch_size)
    events.emit(ready)
    _write_start(job)
    with job.reports, job.loader, job.garbage, job.watchdog, job.stop, job.profiler:
        job.profiler.step(ready)
        batches: list[Any] = []
        while record.step < plan.steps:
            job.watchdog.beat(record.step + 1)
            before, batches = batches, job.stragglers.next(job.loader)
            # Measure the second step: the first one compiles kernels and creates process groups.
            is_measured = config.pipeline.draw and plan.model.is_pipelined and record.step == ready.step + 1
            timeline = engine.accumulate(batches, job.loss, num_own=job.loader.num_own, measured=is_measured)
            engine.set_learning_rates(plan.lr_schedule(record.step))
            result = engine.step()
            record.step = engine.num_steps
            if record.step == ready.step + 1:
                _end_startup(job, result)
            is_saved = plan.is_saved_after(record.step) or plan.is_saved_locally_after(record.step)
            if apply_decisions(job, batches, before, settle=is_saved):
                continue  # rolled back to a checkpoint
            job.state.store.raise_if_failed()
            offload = partial(_offloaded, job)
            done = StepDone(record.step, result.loss, result.grad_norm, result.learning_rate, offload)
            events.emit(done)
            # Call these directly: the event bus saves and restores random and module states around each handler.
            job.profiler.step(done)
            job.garbage.collect(done)
            job.reports.step(result)
            job.journal.progress(record.step)
            if timeline is not None and job.ctx.is_main_process:
                with job.reports.not_training():
                    title = f"{type(plan.model.schedule).__name__}, step {record.step} as measured"
                    draw_measured(timeline, config.run.dir, title=title)
            is_last = record.step == plan.steps
            check_updates(job, since=ready.step)
            is_evaluated = job.evaluate is not None and (is_last or record.step % config.evaluation.every == 0)
            if is_evaluated:
                _evaluate(job)
            _check_replicas(job)
            slow_host = _check_stragglers(job)
            _save_if_due(job, result, is_evaluated=is_evaluated)
            if (cause := job.stop.agreed() or slow_host) is not None and not is_last:
                _save_to_leave(job, result, batches)
                job.stop.leave()
                return Stopped(cause, step=record.step)
        with job.watchdog.phase("a save"):
            job.state.store.clear_tiers(job.ctx)
        return finish_job(job)


def evaluate_job(job: Job) -> TrainResult:
    """Evaluate a job's model without training. `build_job` has restored the newest checkpoint, if any. Collective.

    Trackers receive nothing, and nothing is exported.
    """
    assert job.evaluate is not None
    with job.loader, job.watchdog, job.watchdog.phase("an evaluation"), job.engine.evaluation_weights():
        job.record.evaluation = job.evaluate()
    return train_result(job, export_dir=None)


def _write_start(job: Job) -> None:
    """Write the configuration and the plots to the run folder, and record the start in the journal. Collective."""
    folder = job.plan.config.run.dir
    with writes_together(folder, job.ctx):
        if job.ctx.is_main_process:
            write_config(job.plan.resolved, folder)
            _draw_plans(job.plan)
    job.journal.started(job.record.step)


def _draw_plans(plan: JobPlan) -> None:
    """Draw the pipeline program and the learning-rate schedule in the run folder, if the configuration enables them."""
    config, folder = plan.config, plan.config.run.dir
    if config.pipeline.draw and plan.model.is_pipelined:
        draw_program(plan.model.program, folder, title=type(plan.model.schedule).__name__)
    if config.logging.draw_lr_schedule:
        peak = config.optimizer.learning_rate
        draw_lr_schedule(plan.lr_schedule, folder, num_steps=plan.steps, peak=peak)


def _end_startup(job: Job, result: StepResult) -> None:
    """Check the first step, switch to the step timeout, and prepare background saves. Collective."""
    if result.weight.item() == 0:
        raise UserError(
            f"the loss weight of step {job.record.step} is 0 over all samples, so there is no gradient; expected the "
            f"number of summed items. Check {type(job.plan.task).__name__}.loss, and check that labels are unmasked."
        )
    check_buffers(job.engine.model, step=job.record.step, ctx=job.ctx)
    if job.plan.config.compile is not None and job.ctx.is_main_process and (breaks := describe_graph_breaks()):
        print("d9d: torch.compile runs these lines of the model eagerly:", *breaks, sep="\n")
    job.ctx.set_timeout(job.ctx.timeouts.step + job.watchdog.margin)
    if job.plan.config.checkpoint.background:
        job.state.prepare()


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
        values, forward = dict(record.evaluation), job.engine.pipeline.callable()
        with evaluation_mode(job.engine.model):
            job.events.emit(EvaluationDone(record.step, values, forward, job.reports.track))


def _check_replicas(job: Job) -> None:
    """Compare replicated tensors over the ranks, if the check is due. Collective."""
    every, step = job.plan.config.resilience.replicas.every, job.record.step
    if every is not None and step % every == 0:
        with job.reports.not_training(), job.watchdog.phase("the replica check"):
            check_replicas(job.engine.model, job.engine.optimizer, step=step, ctx=job.ctx)


def _check_stragglers(job: Job) -> str | None:
    """Report ranks that have become slow, if the check is due; return the host to replace, if any. Collective."""
    if not job.stragglers.is_due(job.record.step):
        return None
    with job.reports.not_training(), job.watchdog.phase("the health check"):
        slow, host = job.stragglers.check(job.record.step), job.stragglers.ask_to_replace()
    if slow and job.ctx.is_main_process:
        print(f"d9d: stragglers at step {job.record.step}:", *slow, sep="\n")
        job.journal.slow(job.record.step, slow)
    return host


def _save_if_due(job: Job, result: StepResult, *, is_evaluated: bool) -> None:
    """Save a checkpoint, and save in the local tiers, if they are due. Collective."""
    plan, step = job.plan, job.record.step
    if plan.is_saved_after(step):
        background = plan.config.checkpoint.background and step != plan.steps
        _save(job, result, background=background, is_evaluated=is_evaluated)
    if plan.is_saved_locally_after(step):
        job.reports.settle(result)
        with job.watchdog.phase("a local save"):
            job.state.save_local(job.record)


def _save(job: Job, result: StepResult, *, background: bool, is_evaluated: bool = False) -> None:
    record = job.record
    job.reports.settle(result)
    job.events.emit(CheckpointStarted(record.step))
    metric = record.quality(job.plan.config.checkpoint.best_by) if is_evaluated else None
    with job.reports.not_training(), job.watchdog.phase("a save"):
        check_buffers(job.engine.model, step=record.step, ctx=job.ctx)
        job.state.save(record, metric=metric, background=background)


def _save_to_leave(job: Job, result: StepResult, batches: list[Any]) -> None:
    """Make sure that a checkpoint of the last step is complete before the job stops. Collective."""
    if apply_decisions(job, batches, batches, settle=True):
        return  # rolled back to a checkpoint
    if not job.plan.is_saved_after(job.record.step):
        _save(job, result, background=False)
    with job.watchdog.phase("a save"):
        job.state.finish()
        job.state.store.clear_tiers(job.ctx)
