"""Steps of a training job, its evaluations and checkpoints, and its end."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from d9d_dist import UserError, gather_json
from d9d_dist.values.parameter_writes import refuse_later_writes
from d9d_loop.engine.train_step import StepResult
from d9d_loop.events import (
    BadStepFound,
    CheckpointStarted,
    DataReady,
    EvaluationDone,
    EvaluationStarted,
    Finished,
    ModelExported,
    StepDone,
    TrainResult,
)
from d9d_loop.isolation import evaluation_mode, isolated_random
from d9d_loop.job.garbage import garbage_collection
from d9d_loop.job.job import Job
from d9d_loop.job.job_check import check_measured
from d9d_loop.job.reactions import react
from d9d_loop.job.run_files import write_config, writes_together
from d9d_loop.lr import draw_lr_schedule
from d9d_loop.model.compiled_model import describe_graph_breaks
from d9d_loop.model.export_notes import print_export_notes
from d9d_loop.model.model_check import stand_in_problem
from d9d_loop.resilience import BadStep, Stopped, check_finite, check_replicas, find_non_finite
from d9d_loop.resilience.bad_steps import BadStepError
from d9d_loop.resilience.launcher_watch import LauncherWatch
from d9d_pipeline import Timeline
from d9d_pipeline.plot import draw_measured, draw_program
from d9d_state import save_model_state


def run_job(job: Job, launcher: LauncherWatch) -> TrainResult | Stopped:
    """Run the remaining steps, and export the model. Return `Stopped` if a signal or a slow host ended the job.

    `launcher` watches until the first step. Collective.

    Raises:
        BadStepError: On every rank, if a step was bad and the policy for bad steps is to stop.
    """
    plan, config, engine, record, events = job.plan, job.plan.config, job.engine, job.record, job.events
    engine.num_steps = record.step
    ready = DataReady(record.step, plan.num_microbatches, plan.microbatch_size)
    events.emit(ready)
    _write_start(job)
    garbage = garbage_collection(config.host.collect_garbage_every)
    with job.reports, job.loader, garbage as collect_garbage, job.watchdog, job.stop, job.profiler:
        job.profiler.step(ready)
        _evaluate_if_due(job)  # an earlier start ended after the save of this step, before the end of its evaluation
        launcher.hand_over()  # from now on, `job.stop` watches the launcher: the steps are saved if it is gone
        batches: list[Any] = []
        while record.step < plan.steps and record.ended is None:
            job.watchdog.beat(record.step + 1)
            before, batches = batches, _next_batches(job)
            # Measure the second step: the first one compiles kernels and creates process groups.
            is_measured = config.pipeline.draw and plan.model.is_pipelined and record.step == ready.step + 1
            own, count = job.loader.num_own, job.reports.meter.add
            timeline = engine.accumulate(batches, job.loss, num_own=own, measured=is_measured, on_microbatch=count)
            engine.set_learning_rates(plan.lr_schedule(record.step) * record.rate_factor)
            result = engine.step()
            record.step = engine.num_steps
            if record.step == ready.step + 1:
                _end_startup(job, result)
            is_saved = plan.is_saved_after(record.step) or plan.is_saved_locally_after(record.step)
            if _apply_decisions(job, batches, before, settle=is_saved):
                continue  # rolled back to a checkpoint
            job.state.store.raise_if_failed()
            offload = partial(_offloaded, job)
            finish = job.stop.finish
            done = StepDone(record.step, result.loss, result.grad_norm, result.learning_rate, offload, finish)
            events.emit(done)
            # Call it directly: the event bus saves and restores random and module states around each handler.
            job.profiler.step(done)
            collect_garbage(record.step)
            job.reports.step(result)
            job.journal.progress(record.step, saved=job.state.last_saved)
            _draw_measured(job, timeline)
            is_last = record.step == plan.steps
            if is_last and not job.engine.guard.has_applied:
                raise BadStepError(
                    f"no update was applied in the steps {ready.step + 1} to {record.step}: all were bad steps."
                )
            _check_replicas(job)
            slow_host = _check_stragglers(job)
            _save_if_due(job, result)
            _evaluate_if_due(job)
            if plan.is_saved_locally_after(record.step):
                _save_locally(job, result)
            if not is_last and (stopped := _end_if_agreed(job, result, batches, slow_host)) is not None:
                return stopped
        with job.watchdog.phase("a save"):
            job.state.store.clear_tiers(job.ctx)
        return _finish(job)


def _draw_measured(job: Job, timeline: Timeline | None) -> None:
    if timeline is not None and job.ctx.is_main_process:
        with job.reports.not_training():
            title = f"{type(job.plan.model.schedule).__name__}, step {job.record.step} as measured"
            draw_measured(timeline, job.plan.config.run.dir, title=title)


def _end_if_agreed(job: Job, result: StepResult, batches: list[Any], slow_host: str | None) -> Stopped | None:
    """End the job after its last completed step if a handler, an evaluation, a signal or a slow host asks to.

    Return `Stopped` if the job is not complete. Collective.
    """
    cause = job.stop.agreed()
    if job.stop.is_finished or job.record.ended is not None:
        _end_early(job, result, batches)
        return None
    if (stop := cause or slow_host) is None:
        return None
    _save_to_leave(job, result, batches)
    job.stop.leave()
    return Stopped(stop, step=job.record.step)


def _end_early(job: Job, result: StepResult, batches: list[Any]) -> None:
    """Make the last completed step that of the job: save and evaluate it, unless the job rolls back. Collective."""
    if _apply_decisions(job, batches, batches, settle=True):
        return  # rolled back to a checkpoint
    record = job.record
    record.ended = job.plan.steps
    job.state.finish()
    if job.state.last_saved != record.step:
        _save(job, result, background=False)
    _evaluate_if_due(job)
    job.state.amend(record, metric=record.quality(job.plan.config.checkpoint.best_by))


def evaluate_job(job: Job) -> TrainResult:
    """Evaluate a job's model without training. `build_job` has restored the newest checkpoint, if any. Collective.

    Trackers receive nothing, and nothing is exported.
    """
    assert job.evaluate is not None
    with job.loader, job.watchdog, job.watchdog.phase("an evaluation"), job.engine.evaluation_weights():
        job.record.evaluation = job.evaluate()
    return result_of(job, job.plan.config.run.dir)


def _next_batches(job: Job) -> list[Any]:
    """Return this rank's microbatches of the next step, with the values of the reference if there is one.

    Raises `UserError` on every rank if the data have ended, or results would include stand-ins.
    Collective if a rank has stand-ins, or with a reference.
    """
    try:
        batches = job.stragglers.next(job.loader)
    except StopIteration:
        raise UserError(
            f"the training data ended after {job.loader.position} samples and {job.record.step} of {job.plan.steps} "
            f"steps; expected as many batches as {type(job.plan.stream).__name__}.num_batches() returned. Correct it."
        ) from None
    if job.loader.has_stand_ins:
        problems = gather_json(stand_in_problem(job.engine.model, job.ctx.size("batch", "dp")))
        if problem := next(filter(None, problems), ""):
            raise UserError(f"the data end with fewer microbatches on some ranks, and {problem}")
    return batches if job.plan.reference is None else job.engine.with_reference(batches)


def _write_start(job: Job) -> None:
    """Check the optimizer, write the configuration and the plots, and record the start in the journal. Collective."""
    plan, config, folder = job.plan, job.plan.config, job.plan.config.run.dir
    if job.record.step < plan.steps:
        job.state.check_optimizer()
    with writes_together(folder, job.ctx):
        if job.ctx.is_main_process:
            write_config(plan.resolved, folder)
            if config.pipeline.draw and plan.model.is_pipelined:
                draw_program(plan.model.program, folder, title=type(plan.model.schedule).__name__)
            if config.logging.draw_lr_schedule:
                peak = config.optimizer.learning_rate
                draw_lr_schedule(plan.lr_schedule, folder, num_steps=plan.steps, peak=peak)
    if job.ctx.is_main_process:
        job.journal.started(job.record.step, job.state.store.run_id)


def _end_startup(job: Job, result: StepResult) -> None:
    """Check the first step, switch to the step timeout, and prepare background saves. Collective."""
    if result.weight.item() == 0:
        raise UserError(
            f"the loss weight of step {job.record.step} is 0 over all samples, so there is no gradient; expected the "
            f"number of summed items. Check {type(job.plan.task).__name__}.loss, and check that labels are unmasked."
        )
    job.state.check_tensors()
    if job.plan.config.compile is not None and job.ctx.is_main_process and (breaks := describe_graph_breaks()):
        print("d9d: torch.compile runs these lines of the model eagerly:", *breaks, sep="\n")
    job.ctx.set_timeout(job.ctx.timeouts.step + job.watchdog.margin)
    if job.plan.config.checkpoint.background:
        job.state.prepare()


@contextmanager
def _offloaded(job: Job) -> Generator[None]:
    """Offload training state for the body, with the watchdog paused and the time excluded from the throughput."""
    unlimited = timedelta(days=365)
    with job.reports.not_training(), job.watchdog.phase("offloading", timeout=unlimited), job.engine.offloaded():
        yield


def _is_evaluation_due(job: Job) -> bool:
    """Return True if the last completed step is to be evaluated, and its evaluation is not done yet. Local."""
    step = job.record.step
    is_due = step == job.plan.steps or job.record.ended is not None or step % job.plan.config.evaluation.every == 0
    return job.evaluate is not None and is_due and job.record.evaluated != step


def _evaluate_if_due(job: Job) -> None:
    """Evaluate the model if it is due, and add the results to the checkpoint of the step, if any. Collective."""
    if job.evaluate is None or not _is_evaluation_due(job):
        return
    record = job.record
    job.events.emit(EvaluationStarted(record.step))
    with job.reports.not_training(), job.watchdog.phase("an evaluation"), job.engine.evaluation_weights():
        record.evaluation, record.evaluated = job.evaluate(), record.step
        check_measured(job.plan.config, record.evaluation)
        job.reports.evaluation()
        # A copy, so that a handler cannot change the record.
        values, forward = dict(record.evaluation), job.engine.pipeline.callable()
        with evaluation_mode(job.engine.model):
            asked: list[bool] = []
            finish = partial(asked.append, True)
            job.events.emit(EvaluationDone(record.step, values, forward, job.reports.track, finish))
        if any(gather_json(bool(asked))):
            record.ended = job.plan.steps
        if (why := react(record, job.plan.config)) is not None:
            record.ended = job.plan.steps
            job.reports.progress.line(f"the job ends at step {record.step}: {why}")
    with job.reports.not_training(), job.watchdog.phase("a save"):
        job.reports.flush()
        job.state.amend(record, metric=record.quality(job.plan.config.checkpoint.best_by))


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


def _save_if_due(job: Job, result: StepResult) -> None:
    """Save a checkpoint if it is due; complete it before an evaluation, which may fail. Collective."""
    plan, step = job.plan, job.record.step
    if plan.is_saved_after(step):
        is_background = plan.config.checkpoint.background and step != plan.steps and not _is_evaluation_due(job)
        _save(job, result, background=is_background)


def _save(job: Job, result: StepResult, *, background: bool) -> None:
    record = job.record
    job.reports.settle(result)
    job.events.emit(CheckpointStarted(record.step))
    metric = record.quality(job.plan.config.checkpoint.best_by)
    with job.reports.not_training(), job.watchdog.phase("a save"):
        job.state.save(record, metric=metric, background=background)


def _save_locally(job: Job, result: StepResult) -> None:
    """Save in the local tiers that are due. Collective."""
    job.reports.settle(result)
    with job.watchdog.phase("a local save"):
        job.state.save_local(job.record)


def _save_to_leave(job: Job, result: StepResult, batches: list[Any]) -> None:
    """Make sure that a checkpoint of the last step is complete before the job stops. Collective."""
    if _apply_decisions(job, batches, batches, settle=True):
        return  # rolled back to a checkpoint
    if not job.plan.is_saved_after(job.record.step):
        _save(job, result, background=False)
    with job.watchdog.phase("a save"):
        job.state.finish()
        job.state.store.clear_tiers(job.ctx)


def _apply_decisions(job: Job, batches: list[Any], before: list[Any], *, settle: bool) -> bool:
    """Apply the decisions on bad steps that are known by now; return True if the job rolled back. Collective.

    `batches` and `before` are the microbatches of the last step and of the step before it. With `settle`, wait for the
    decision on the last step. Raises `BadStepError` on every rank if a decision is to stop.
    """
    while (bad := job.engine.guard.poll(settle=settle)) is not None:
        why = bad.why
        if bad.kind == "non-finite":
            why += _origin_of(job, bad, batches if bad.step == job.record.step else before)
        job.events.emit(BadStepFound(bad.step, bad.kind, bad.decision, why))
        job.reports.progress.line(why)
        if bad.decision == "stop":
            raise BadStepError(why)
        if bad.decision == "roll_back":
            _roll_back(job)
            return True
    return False


def _origin_of(job: Job, bad: BadStep, batches: list[Any]) -> str:
    """Run a non-finite step again, and describe the first non-finite tensor. Collective."""
    with isolated_random(job.plan.config.seed, "replay", bad.step, device=True):
        found = find_non_finite(job.engine.model, partial(job.engine.replay, batches, job.loss), ctx=job.ctx)
    origin = f" {found}." if found else " In a second run of the step, all tensors are finite."
    return origin + (" Another update was applied before the second run." if bad.step < job.record.step else "")


def _roll_back(job: Job) -> None:
    with job.watchdog.phase("the rollback to a checkpoint"):
        restored = job.state.roll_back()
    job.engine.guard.on_rollback()
    job.record.take(restored)
    job.engine.after_restore(restored.step)
    job.reports.on_rollback()
    job.profiler.on_rollback(restored.step)


def _finish(job: Job) -> TrainResult:
    """Export the model, and emit `Finished` with the result. Collective.

    Raises:
        UserError: If a forward wrote to sharded parameters.
        BadStepError: If a parameter is not finite.
    """
    refuse_later_writes(job.engine.model)
    config = job.plan.config
    if config.export == "best":
        step = job.state.load_step(None, config.checkpoint.retention)
        job.reports.progress.line(
            f"the export has the weights of step {step}, the best by {config.checkpoint.best_by}."
        )
    result = _export_to(job, config.run.dir, exports=bool(config.export))
    job.journal.ended(job.record.step, "finished")
    return result


def export_step(job: Job, *, step: int | None, folder: Path) -> TrainResult:
    """Export the checkpoint of a step, or the best one, to `folder/export`; emit `Finished`. Collective.

    Raises:
        UserError: On every rank, if there is no such checkpoint.
    """
    with job.loader, job.watchdog:
        job.state.load_step(step, job.plan.config.checkpoint.retention)
        return _export_to(job, folder, exports=True)


def _export_to(job: Job, folder: Path, *, exports: bool) -> TrainResult:
    """Export the model to `folder/export`, and emit `Finished` with the result. Collective."""
    limit = job.ctx.timeouts.startup
    # The export and the handlers of `Finished` may take longer than a step.
    job.ctx.set_timeout(limit + job.watchdog.margin)
    with job.watchdog.phase("the end of the job", timeout=limit), job.engine.evaluation_weights():
        provider = job.plan.model.provider
        check_finite(job.engine.model, step=job.record.step, ctx=job.ctx, dtype_of=provider.export_dtype)
        if exports and not provider.is_exported_by_handler:
            _export(job, folder / "export")
        result = result_of(job, folder)
        forward, for_generation = job.engine.pipeline.callable(), job.engine.for_generation
        job.events.emit(Finished(job.record.step, result, job.engine.model, forward, job.ctx, for_generation))
    return result_of(job, folder)  # again: a handler may have written the export, such as that of a job with adapters


def result_of(job: Job, run_dir: Path) -> TrainResult:
    """Return the result of a job after its last completed step. Collective: all ranks report what rank 0 sees."""
    record, folder = job.record, run_dir / "export"
    has_export = gather_json(folder.is_dir())[0]
    return TrainResult(
        steps=record.step,
        train_loss=math.nan if record.train_loss is None else record.train_loss,
        evaluation=dict(record.evaluation),
        weight_per_second=record.weight_per_second or 0.0,
        run_dir=run_dir,
        export_dir=folder if has_export else None,
    )


def _export(job: Job, folder: Path) -> None:
    """Export the model, with the tokenizer and other files of the initial weights. Collective."""
    config, provider = job.plan.config, job.plan.model.provider
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
    if job.ctx.is_main_process:
        print_export_notes(folder)
    job.events.emit(ModelExported(job.record.step, folder))
