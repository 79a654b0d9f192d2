"""Start and end of a planned training job: rehearsal, process group, lock of the run folder, failure messages."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

from pydantic import JsonValue

from d9d_dist import DistributedContext, UserError, gather_json
from d9d_dist.failures.first_failure import named_failure
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.engine.local_tiers import local_tiers
from d9d_loop.engine.start import agree_on_start
from d9d_loop.event_bus import Events
from d9d_loop.events import ConfigReady, Failed, TrainResult
from d9d_loop.job.end_command import describe_cause, early_failure_reported, report_early_failure, run_command
from d9d_loop.job.flop_formula import FlopFormula
from d9d_loop.job.job import Job, build_job
from d9d_loop.job.job_check import checkpoint_folder
from d9d_loop.job.job_run import evaluate_job, run_job
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.rehearsal import rehearse
from d9d_loop.job.start_messages import print_start
from d9d_loop.resilience import Stopped
from d9d_loop.resilience.launcher_watch import LauncherWatch
from d9d_state import CheckpointStore
from d9d_state.folder_lock import locked_folder


def train(plan: JobPlan, events: Events, run: Callable[[Job], TrainResult | Stopped] | None = None) -> TrainResult:
    """Run a planned job to its last step, or `run` it after its checkpoint is restored; see `Trainer.train`."""
    launch, config = plan.model.launch, plan.config
    with LauncherWatch() as launcher, ExitStack() as stack:
        with early_failure_reported(config.run, launch.rank):
            trains = run is None and not config.evaluation.only
            rehearsed = _rehearse(plan) if trains or config.rehearsal else None
            timeouts = config.resilience.timeouts.timeouts
            mesh = plan.model.mesh.build(launch=launch, timeouts=timeouts, precision=config.precision)
            ctx = stack.enter_context(mesh)
        result = _train(
            plan, ctx, events, launcher, rehearsed, run=run or (evaluate_job if config.evaluation.only else None)
        )
    if isinstance(result, Stopped):
        # Raised outside the context, which would report the exception to the other ranks as a failure.
        raise result
    return result


def _rehearse(plan: JobPlan) -> JsonValue | UserError:
    """Rehearse on rank 0; return the FLOPs of the model as JSON, if they are known.

    Return the mistake of rank 0 if other ranks wait for this rank, and raise it if there are none.
    """
    try:
        return rehearse(plan)
    except UserError as error:
        if plan.model.launch.world_size == 1:
            raise
        return error


def _train(
    plan: JobPlan,
    ctx: DistributedContext,
    events: Events,
    launcher: LauncherWatch,
    rehearsed: JsonValue | UserError,
    *,
    run: Callable[[Job], TrainResult | Stopped] | None,
) -> TrainResult | Stopped:
    config, job, is_locked = plan.config, None, False
    try:
        others = {
            "collate": plan.data.collate,
            "the optimizer": plan.optimizer,
            "the learning-rate schedule": plan.lr_schedule,
        }
        agree_on_start(
            plan.resolved,
            ctx,
            plan.model,
            plan.task,
            others,
            mistake=rehearsed if isinstance(rehearsed, UserError) else None,
            data={"the training data": plan.data_identity, "the evaluation data": plan.evaluation_identity},
            health=config.resilience.health,
        )
        events.emit(ConfigReady(0, plan.resolved, ctx))
        tiers = local_tiers(config.checkpoint, config.run.dir)
        for tier in tiers:
            tier.connect(ctx)
        store = CheckpointStore(checkpoint_folder(config), retention=config.checkpoint.retention, tiers=tiers)
        # On any exit, the store finishes a pending save before the folder is unlocked.
        wait_seconds = config.resilience.timeouts.lock_seconds
        with store.locked(ctx, wait_seconds=wait_seconds), _locked_for_export(config, ctx), store:
            is_locked = True
            assert not isinstance(rehearsed, UserError)  # all ranks have raised it
            of_rank_0 = gather_json(rehearsed)[0]
            flops = of_rank_0 and FlopFormula.from_json(of_rank_0)
            job = build_job(plan, store=store, ctx=ctx, events=events, flops=flops)
            print_start(job, changes=run in {None, evaluate_job})
            if run is not None:
                return run(job)
            result = run_job(job, launcher)
            if isinstance(result, Stopped):
                job.journal.ended(result.step, result.cause)
            elif ctx.is_main_process:
                run_command(config.run.on_completion, config.run.dir)
            return result
    except BaseException as error:
        if isinstance(error, UserError):
            # The error may occur on this rank only; because of the note, `cli_main` prints it on this rank, too.
            error.add_note(f"on rank {ctx.rank}")
        if isinstance(error, KeyboardInterrupt):
            error.add_note(_what_is_saved(config))
        _report_failure(error, job, events)
        if job is not None:
            job.journal.failed(describe_cause(error), named_failure(error))
        else:  # without the lock, the status may be that of another job
            report_early_failure(config.run, ctx.rank, error, writes_status=is_locked)
        raise


@contextmanager
def _locked_for_export(config: TrainerConfig, ctx: DistributedContext) -> Generator[None]:
    """Lock the run folder for an export if checkpoints are elsewhere. All ranks must see the folder. Collective."""
    if config.checkpoint.folder is None or not config.export:
        yield
        return
    wait_seconds = config.resilience.timeouts.lock_seconds
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(config.run.dir, ctx, wait_seconds=wait_seconds))
        except UserError as error:
            raise UserError(
                f"{error} The export is written to this folder; set export = false if the hosts share no folder."
            ) from error
        yield


def _report_failure(error: BaseException, job: Job | None, events: Events) -> None:
    """Emit `Failed`. If an event handler raises, add its exception as a note to `error`."""
    try:
        events.emit(Failed(0 if job is None else job.record.step, error))
    except Exception as another:
        error.add_note(f"in addition, {another!r} was " + "; ".join(getattr(another, "__notes__", ())))


def _what_is_saved(config: TrainerConfig) -> str:
    """Return a message about the newest checkpoint, from which the same command would resume."""
    found = CheckpointStore(checkpoint_folder(config)).complete()
    if not found:
        return f"No checkpoint is saved in {config.run.dir}; the same command starts again."
    return f"The newest checkpoint is that of step {found[0].step}; the same command resumes from it."
