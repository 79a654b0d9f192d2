"""End of a training job: its result, and the exported model."""

import math
from pathlib import Path

from d9d_dist import refuse_later_writes
from d9d_loop.events import Finished, ModelExported, TrainResult
from d9d_loop.job.job_parts import Job
from d9d_state import save_model_state


def finish_job(job: Job) -> TrainResult:
    """Export the model, and emit `Finished` with the result. Collective.

    Raises:
        UserError: If a forward wrote to sharded parameters.
    """
    refuse_later_writes(job.engine.model)
    limit = job.ctx.timeouts.startup
    # The export and the handlers of `Finished` may take longer than a step.
    job.ctx.set_timeout(limit + job.watchdog.margin)
    with job.watchdog.phase("the end of the job", timeout=limit), job.engine.evaluation_weights():
        result = train_result(job, export_dir=_export(job) if job.plan.config.export else None)
        forward = job.engine.pipeline.callable()
        job.events.emit(Finished(job.record.step, result, job.engine.model, forward, job.ctx))
    job.journal.ended(job.record.step, "finished")
    return result


def train_result(job: Job, *, export_dir: Path | None) -> TrainResult:
    """Return the result of a job after its last completed step."""
    record = job.record
    return TrainResult(
        steps=record.step,
        train_loss=math.nan if record.train_loss is None else record.train_loss,
        evaluation=dict(record.evaluation),
        weight_per_second=record.weight_per_second or 0.0,
        run_dir=job.plan.config.run.dir,
        export_dir=export_dir,
    )


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
