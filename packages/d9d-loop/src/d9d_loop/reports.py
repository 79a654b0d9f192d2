"""Turns what steps measure into what people and trackers see, and keeps the job's record of it."""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from pydantic import JsonValue

from d9d_dist import DistributedContext
from d9d_loop.config import TrainerConfig
from d9d_loop.job_state import Record
from d9d_loop.lr_schedule import LrSchedule
from d9d_loop.progress import Progress
from d9d_loop.schedule_pictures import draw_measured, draw_program
from d9d_loop.schedules import draw_lr_schedule
from d9d_loop.train_step import StepOutcome
from d9d_metrics import Metric, MultiTracker, build_trackers, compute_metrics, redact_secrets
from d9d_pipeline import Program


class Reports:
    """Shows and tracks the values of a job. Values are brought to the host only on the steps that are reported.

    Opening it creates the run's folder, writes `config.json` and the picture of the pipeline's schedule, if there are
    several ranks in it, and opens the trackers, on the main process.

    Args:
        config: The job's configuration.
        resolved: The same, as JSON.
        record: The job's record, which reports keep up to date.
        weight_unit: What the loss's weight counts, e.g. tokens.
        program: What the ranks of the pipeline do in a step.
        schedule: The name of what that follows from.
        lr_schedule: Factor of the peak learning rate by step.
        ctx: The job's context.
    """

    def __init__(
        self,
        config: TrainerConfig,
        resolved: Mapping[str, JsonValue],
        *,
        record: Record,
        weight_unit: str,
        program: Program,
        schedule: str,
        lr_schedule: LrSchedule,
        ctx: DistributedContext,
    ) -> None:
        self._config, self._record, self._ctx, self._schedule = config, record, ctx, schedule
        self._throughput_name = f"{weight_unit}_per_second"
        self._tracker = _open_trackers(config, resolved, record) if ctx.is_main_process else MultiTracker([])
        if ctx.is_main_process and len(program.ranks) > 1:
            draw_program(program, config.run.dir, title=schedule)
        if ctx.is_main_process and config.logging.draw_lr_schedule:
            peak = config.optimizer.learning_rate
            draw_lr_schedule(lr_schedule, config.run.dir, num_steps=config.steps, peak=peak)
        self._progress = Progress(
            num_steps=config.steps, done=record.step, visible=ctx.is_main_process, bar=config.logging.progress
        )
        self._clock = _Clock(ctx.device)

    def __enter__(self) -> Self:
        """Give the reports themselves."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the trackers and the progress bar."""
        self._progress.close()
        self._tracker.close()

    def step(self, outcome: StepOutcome, metrics: Mapping[str, Metric]) -> None:
        """Count a step, and report it if its turn has come. Collective on those steps."""
        self._progress.step()
        self._clock.add(outcome.weight)
        if outcome.timeline is not None and self._ctx.is_main_process:
            title = f"{self._schedule}, step {self._record.step} as measured"
            with self.not_training():
                draw_measured(outcome.timeline, self._config.run.dir, title=title)
        step, every = self._record.step, self._config.logging.every
        if step % every and step not in (1, self._config.steps):
            return
        values = {
            "loss": outcome.loss.item(),
            "learning_rate": outcome.learning_rate,
            "grad_norm": outcome.grad_norm.item(),
            self._throughput_name: self._clock.lap(),
            **compute_metrics(metrics, self._ctx.group_for("batch", "pp", "dp", "cp")),
        }
        for metric in metrics.values():
            metric.reset()
        self._tracker.log(step, values)
        self._progress.values(values)

    @contextmanager
    def not_training(self) -> Generator[None]:
        """Leave the time of the body out of the throughput."""
        self._clock.stop()
        try:
            yield
        finally:
            self._clock.start()

    def evaluation(self) -> None:
        """Report the evaluation that the record holds."""
        values = self._record.evaluation
        self._tracker.log(self._record.step, {f"evaluation_{name}": value for name, value in values.items()})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._progress.line(f"step {self._record.step}: held-out {shown}")

    def line(self, text: str) -> None:
        """Show a line to people."""
        self._progress.line(text)

    def rewound(self) -> None:
        """The record stands at an earlier step now: what was tracked since then is forgotten."""
        self._tracker.resume(self._record.step, self._record.tracker)
        self._progress.go_to(self._record.step)

    def settle(self, outcome: StepOutcome) -> None:
        """Bring the record up to date before it is saved."""
        self._record.train_loss = outcome.loss.item()
        self._tracker.flush()
        self._record.tracker = self._tracker.state_dict()
        self._record.weight_per_second = self._clock.average()


class _Clock:
    """Measures throughput: weight over the time between `start` and `stop`. It is made running."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._lap_weight, self._total_weight = zero, zero.clone()
        self._lap_seconds = self._total_seconds = 0.0
        self._since = time.perf_counter()

    def add(self, weight: torch.Tensor) -> None:
        self._lap_weight = self._lap_weight + weight

    def lap(self) -> float:
        """Throughput since the last lap; waits for the device, so that the time is that of the work."""
        weight = self._lap_weight.item()
        self._take_time()
        throughput = weight / max(self._lap_seconds, 1e-9)
        self._end_lap()
        return throughput

    def average(self) -> float:
        """Throughput since the start."""
        weight = (self._total_weight + self._lap_weight).item()
        self._take_time()
        return weight / max(self._total_seconds + self._lap_seconds, 1e-9)

    def stop(self) -> None:
        """Leave out the time from here to the next `start`; waits for the device, whose work belongs to before."""
        self._lap_weight.item()
        self._take_time()

    def start(self) -> None:
        """Go on after a `stop`."""
        self._since = time.perf_counter()

    def _take_time(self) -> None:
        now = time.perf_counter()
        self._lap_seconds += now - self._since
        self._since = now

    def _end_lap(self) -> None:
        self._total_weight = self._total_weight + self._lap_weight
        self._total_seconds += self._lap_seconds
        self._lap_weight, self._lap_seconds = torch.zeros_like(self._lap_weight), 0.0


def _open_trackers(config: TrainerConfig, resolved: Mapping[str, JsonValue], record: Record) -> MultiTracker:
    folder = config.run.dir
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(redact_secrets(resolved), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")
    tracker = build_trackers(config.trackers, folder)
    # A run that was killed before its first checkpoint starts over: what it tracked is forgotten too.
    tracker.resume(record.step, record.tracker)
    tracker.log_config(resolved)
    return tracker
