"""Parts of a training job on one rank."""

from dataclasses import dataclass

from d9d_dist import DistributedContext
from d9d_loop.data import StreamLoader
from d9d_loop.engine.engine import Engine
from d9d_loop.event_bus import Events
from d9d_loop.job.evaluation import Evaluator
from d9d_loop.job.garbage import GarbageCollection
from d9d_loop.job.job_state import JobState, Record
from d9d_loop.job.journal import Journal
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.profiler import Profiler
from d9d_loop.job.reports import Reports
from d9d_loop.resilience import HangWatchdog, StepGuard, StopSignals, StragglerWatch
from d9d_loop.task import LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts of a training job on one rank, restored from the newest checkpoint if there is one.

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
        journal: Records starts, progress and failures of the run.
        garbage: Collects Python's garbage at fixed steps.
        watchdog: Ends the job if a rank hangs.
        stop: Makes ranks agree on stop signals.
        stragglers: Detects slow ranks.
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
    journal: Journal
    garbage: GarbageCollection
    watchdog: HangWatchdog
    stop: StopSignals
    stragglers: StragglerWatch
