"""Decisions on bad steps of a training job: reports the origin of bad steps, and rolls back or stops the job."""

from functools import partial
from typing import Any

from d9d_loop.events import BadStepFound
from d9d_loop.isolated_random import isolated_random
from d9d_loop.job.job_parts import Job
from d9d_loop.resilience import BadStep, find_non_finite
from d9d_loop.resilience.bad_steps import BadStepError


def apply_decisions(job: Job, batches: list[Any], before: list[Any], *, settle: bool) -> bool:
    """Apply the decisions on bad steps that are known by now; return True if the job rolled back. Collective.

    `batches` and `before` are the microbatches of the last step and of the step before it. With `settle`, wait for the
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
        if bad.decision == "roll_back":
            _roll_back(job)
            return True
    return False


def check_updates(job: Job, *, since: int) -> None:
    """After the last step, raise `BadStepError` on every rank if all updates since step `since` were skipped."""
    if job.record.step == job.plan.steps and not job.guard.has_applied:
        raise BadStepError(f"no update was applied in the steps {since + 1} to {job.record.step}: all were bad steps.")


def _origin_of(job: Job, bad: BadStep, batches: list[Any]) -> str:
    """Run a non-finite step again, and describe the first non-finite tensor. Collective."""
    with isolated_random(job.plan.config.seed, "replay", bad.step, device=True):
        found = find_non_finite(job.engine.model, partial(job.engine.replay, batches, job.loss), ctx=job.ctx)
    origin = f" {found}." if found else " In a second run of the step, all tensors are finite."
    return origin + (" Another update was applied before the second run." if bad.step < job.record.step else "")


def _roll_back(job: Job) -> None:
    with job.watchdog.phase("the rollback to a checkpoint"):
        restored = job.state.roll_back()
    job.guard.on_rollback()
    job.record.take(restored)
    job.engine.num_steps = restored.step
    job.engine.pipeline.shared.copy_values()
    job.reports.on_rollback()
    job.profiler.on_rollback(restored.step)
