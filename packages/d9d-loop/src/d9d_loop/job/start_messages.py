"""Messages of a start: the step from which a job continues, what has changed since, and whether it is complete."""

from d9d_dist import UserError, agree
from d9d_loop.job.earlier_run import check_owner, check_progress, keep_earlier_files, read_earlier_run
from d9d_loop.job.job import Job
from d9d_loop.job.resume_check import NEW_RUN
from d9d_state import StateError


def print_start(job: Job, *, changes: bool = True) -> None:
    """Print the step of the start and, if it matters, `changes`. A start at step 0 keeps progress. Collective."""
    problem: str | UserError | None = None
    lines: list[str] = []
    if job.ctx.is_main_process:
        try:
            lines = _start_messages(job)[: None if changes else 1]
        except UserError as error:
            problem = error
        except (OSError, StateError) as error:
            problem = f"the earlier start of the run in {job.plan.config.run.dir} cannot be read or kept: {error}"
    agree(problem, error=StateError)
    for line in lines:
        print(line, flush=True)


def _start_messages(job: Job) -> list[str]:
    """Check a start at step 0 and rename the files of an earlier one; return the messages. Main process only."""
    config, restored = job.plan.config, job.state.restored
    if restored is not None:
        check_owner(config, restored)  # the plan has not seen the steps of local tiers
        resumed = f"d9d: resumed from step {job.record.step} at {restored.root}."
        return [resumed, *(_resume_messages(job) if job.record.step else ())]  # a checkpoint may be of step 0
    check_progress(config, job.state.store.root)
    if not config.evaluation.only:
        keep_earlier_files(config)
    lost = read_earlier_run(config.run.dir).completed
    note = f" The {lost} steps of the last start were not saved." if lost else ""
    return [f"d9d: the run in {config.run.dir} starts from scratch.{note}"]


def _resume_messages(job: Job) -> list[str]:
    """Describe what has changed since the checkpoint from which a job resumes, and whether the job is complete."""
    plan, config, record, changes = job.plan, job.plan.config, job.record, [*job.plan.changes]
    before, now = job.state.optimizer_before, type(job.engine.optimizer).__qualname__
    if before not in {None, now}:
        changes.append(f"  the optimizer was {before}, whose state is loaded, and now is {now}")
    was, rate = record.learning_rate, job.engine.peak_learning_rate * plan.lr_schedule(record.step - 1)
    if was is not None and abs(rate - was) > 1e-9 * max(abs(rate), abs(was)):
        changes.append(f"  the learning rate of step {record.step} was {was:g}, and now continues from {rate:g}")
    steps = plan.steps if record.ended is None else record.step
    if record.step < steps or config.evaluation.only:
        return [f"d9d: resumed at step {record.step} with other settings:", *changes] if changes else []
    by_data = "more data" if config.epochs is None else f"--epochs {config.epochs + 1} or more"
    more = by_data if config.steps is None else f"--steps {steps + 1} or more"
    return [
        f"d9d: the run in {config.run.dir} is complete at step {record.step}: no step is trained. "
        f"Use {more} to continue it, {NEW_RUN}.",
        *(["d9d: since the checkpoint, these have changed, without an effect:", *changes] if changes else []),
    ]
