"""Parts of a training job on one rank. The caller starts the process group and locks the run folder before."""

import socket
from dataclasses import dataclass
from functools import partial

from torch import nn

from d9d_dist import DistributedContext, gather_json
from d9d_loop.data import StreamLoader
from d9d_loop.engine.code_digest import evaluation_digest
from d9d_loop.engine.engine import Engine
from d9d_loop.engine.job_state import JobState, Record
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.reference import FrozenReference
from d9d_loop.engine.start import Training, build_training
from d9d_loop.event_bus import Events
from d9d_loop.events import ModelReady, OptimizerReady
from d9d_loop.job.evaluation import Evaluator
from d9d_loop.job.flop_formula import FlopFormula
from d9d_loop.job.journal import Journal
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.profiler import Profiler
from d9d_loop.job.reports import Reports
from d9d_loop.job.resume_check import Progress
from d9d_loop.resilience import HangWatchdog, StopSignals, StragglerWatch
from d9d_loop.task import LossFunction, measured_loss
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_state import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts of a training job on one rank, restored from the newest checkpoint if there is one.

    Attributes:
        loss: Loss of a microbatch, which also updates the task's metrics.
        loader: Yields this rank's microbatches of each step, on its device.
        evaluate: Evaluates the model; `None` without evaluation data.
        state: Saves and restores model, optimizer, loader and guard.
        stop: Makes ranks agree on stop signals.
    """

    plan: JobPlan
    ctx: DistributedContext
    events: Events
    engine: Engine
    loss: LossFunction
    loader: StreamLoader
    evaluate: Evaluator | None
    state: JobState
    record: Record
    reports: Reports
    profiler: Profiler
    journal: Journal
    watchdog: HangWatchdog
    stop: StopSignals
    stragglers: StragglerWatch


def build_job(
    plan: JobPlan, *, store: CheckpointStore, ctx: DistributedContext, events: Events, flops: FlopFormula | None = None
) -> Job:
    """Build the parts of a job, and restore the newest checkpoint or load the initial weights. Collective.

    `flops` are the model FLOPs to report; `None` if they are not known.

    Emits `ModelReady` and `OptimizerReady`.

    Raises:
        UserError: If `parallelize` of the model provider does not fit the mesh, or the checkpoint does not fit the job.
        StateError: On every rank, if there are checkpoints, but none is valid.
    """
    config, task = plan.config, plan.task
    training = build_training(
        plan.model,
        ctx,
        plan.optimizer,
        gradients=config.gradients,
        average=config.average,
        bad_steps=config.resilience.bad_steps,
        progress=config.logging.progress,
        compile_with=config.compile,
    )
    pipeline, optimizer = training.pipeline, training.optimizer
    metrics = {name: metric.to(ctx.device) for name, metric in task.metrics().items()}
    loader = plan.loader(ctx)
    state = JobState(
        store,
        model=pipeline.model,
        optimizer=optimizer,
        average=training.average,
        metrics=metrics,
        parts={"data": loader, "bad_steps": training.guard},
        config=redact_secrets(plan.resolved),
        data_identity=plan.data_identity(),
        code={**plan.code, **evaluation_digest(plan.evaluation_identity())},
        seed=config.seed,
        ctx=ctx,
        events=events,
        trainable_only=config.checkpoint.trainable_only,
    )
    reference = _reference_of(plan, pipeline)  # before a checkpoint replaces the initial values
    if plan.reference == "initial":
        state.keep_reference()
    record = state.restore()
    if record.ended != plan.steps:  # the job has another number of steps now
        record.ended = None
    plan = plan.resumed_from(Progress(record.step, loader.position, loader.cursor_state))
    pipeline.shared.copy_values()
    events.emit(ModelReady(record.step, pipeline.model, ctx))
    events.emit(OptimizerReady(record.step, optimizer))
    engine = build_engine(plan, training, ctx=ctx, events=events, reference=reference)
    hosts = gather_json(socket.gethostname())
    journal = Journal(config.run.dir, ctx, steps=plan.steps, hosts=hosts, on_failure=config.run.on_failure)
    watchdog = HangWatchdog(ctx, enabled=config.resilience.watchdog.enabled, on_exit=journal.failed)
    events.watch(watchdog.phase)
    return Job(
        plan=plan,
        ctx=ctx,
        events=events,
        engine=engine,
        loss=partial(measured_loss, task, metrics),
        loader=loader,
        evaluate=_build_evaluator(plan, engine, reference),
        state=state,
        record=record,
        reports=Reports(plan, record=record, metrics=metrics, ctx=ctx, flops=flops),
        profiler=Profiler(config.profile, config.run.dir, ctx, num_steps=plan.steps),
        journal=journal,
        watchdog=watchdog,
        stop=StopSignals(config.resilience.stop, ctx),
        stragglers=StragglerWatch(config.resilience.health, ctx),
    )


def _reference_of(plan: JobPlan, pipeline: Pipeline) -> FrozenReference | None:
    """Return the reference of a job, with the current values of the model; `None` for none. Collective."""
    if plan.reference is None:
        return None
    pipeline.shared.copy_values()
    return FrozenReference(plan.reference, pipeline.model, whole=nn.ModuleList(pipeline.stages.values()))


def build_engine(
    plan: JobPlan,
    training: Training,
    *,
    ctx: DistributedContext,
    events: Events | None = None,
    reference: FrozenReference | None = None,
) -> Engine:
    """Build the engine of a job. The caller acts on the decisions on bad steps. Collective."""
    return Engine(
        training.pipeline,
        training.optimizer,
        ctx=ctx,
        task=plan.task,
        max_norm=plan.config.gradients.max_norm,
        num_microbatches=plan.num_microbatches,
        guard=training.guard,
        polls_guard=False,
        average=training.average,
        peak_learning_rate=plan.peak_learning_rate,
        events=events,
        reference=reference,
    )


def _build_evaluator(plan: JobPlan, engine: Engine, reference: FrozenReference | None) -> Evaluator | None:
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
        compute=plan.compute_metrics,
        reference=reference,
    )
