"""Turns what steps measure into what people and trackers see, and keeps the job's record of it."""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from pydantic import JsonValue

from d9d_dist import DistributedContext
from d9d_loop.config import TrainerConfig
from d9d_loop.job_state import Record
from d9d_loop.lr_schedule import LrSchedule
from d9d_loop.progress import Progress
from d9d_loop.schedule_pictures import draw_measured, draw_program
from d9d_loop.schedules import draw_lr_schedule
from d9d_loop.train_step import StepOutcome
from d9d_metrics import Metric, MetricCollector, MultiTracker, Tracker, build_trackers, redact_secrets
from d9d_pipeline import Program


class Reports:
    """Shows and tracks the values of a job, without waiting for them.

    What is due is reduced and brought to the host by a `MetricCollector`: the step's thread only issues the collective,
    so that it has the same place among all others on every rank. That holds on CPU too, where waiting would let each
    rank stand still for the slowest one. Values come out in the order of steps, at most two reports late; an
    evaluation, a save and the end wait for them.

    Opening it creates the run's folder, writes `config.json` and the picture of the pipeline's schedule, if there are
    several ranks in it, and opens the trackers, on the main process.

    Args:
        config: The job's configuration.
        resolved: The same, as JSON.
        record: The job's record, which reports keep up to date.
        metrics: What the task measures, on this rank; reset by each report.
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
        metrics: Mapping[str, Metric],
        weight_unit: str,
        program: Program,
        schedule: str,
        lr_schedule: LrSchedule,
        ctx: DistributedContext,
    ) -> None:
        self._config, self._resolved, self._record, self._ctx = config, resolved, record, ctx
        self._metrics, self._program = metrics, program
        self._schedule, self._lr_schedule = schedule, lr_schedule
        self._throughput_name = f"{weight_unit}_per_second"
        self._open = ExitStack()
        self._tracker: Tracker = MultiTracker([])

    def __enter__(self) -> Self:
        """Open the trackers and the progress bar; the time of training begins."""
        config, ctx = self._config, self._ctx
        with ExitStack() as opened:
            if ctx.is_main_process:
                _write_config(self._resolved, config.run.dir)
                self._draw_plans()
                self._tracker = build_trackers(config.trackers, config.run.dir)
                opened.callback(self._tracker.close)
                # A run that was killed before its first checkpoint starts over: what it tracked is forgotten too.
                self._tracker.resume(self._record.step, self._record.tracker)
                self._tracker.log_config(self._resolved)
            self._progress = Progress(
                num_steps=config.steps, done=self._record.step, visible=ctx.is_main_process, bar=config.logging.progress
            )
            opened.callback(self._progress.close)
            group = ctx.group_for("batch", "pp", "dp", "cp")
            self._collector = opened.enter_context(
                MetricCollector(self._metrics, group, self._deliver, device=ctx.device)
            )
            self._open = opened.pop_all()
        self._clock = _Clock(ctx.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Hand on what is on its way, and close the trackers and the progress bar."""
        self._open.__exit__(kind, error, at)

    def step(self, outcome: StepOutcome) -> None:
        """Count a step, and report it if its turn has come. Collective on those steps, and waits for nothing."""
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
            "loss": outcome.loss,
            "learning_rate": outcome.learning_rate,
            "grad_norm": outcome.grad_norm,
            self._throughput_name: self._clock.lap(),
        }
        self._collector.collect(step, values)

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
        self._collector.flush()
        self._tracker.log(self._record.step, {f"evaluation_{name}": value for name, value in values.items()})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._progress.line(f"step {self._record.step}: held-out {shown}")

    def line(self, text: str) -> None:
        """Show a line to people."""
        self._progress.line(text)

    def rewound(self) -> None:
        """The record stands at an earlier step now: what was tracked since then is forgotten."""
        self._collector.flush()
        self._tracker.resume(self._record.step, self._record.tracker)
        self._progress.go_to(self._record.step)

    def settle(self, outcome: StepOutcome) -> None:
        """Bring the record up to date before it is saved. Collective: the throughput is that of the main process."""
        with self.not_training():
            throughput = self._clock.average()
            if self._ctx.world_size > 1:
                dist.broadcast(throughput, src=0)
            self._record.weight_per_second = throughput.item()
            self._record.train_loss = outcome.loss.item()
            self._collector.flush()
            self._tracker.flush()
            self._record.tracker = self._tracker.state_dict()

    def _deliver(self, step: int, values: Mapping[str, float]) -> None:
        """Called by the collector's thread."""
        self._tracker.log(step, values)
        self._progress.values(step, values)

    def _draw_plans(self) -> None:
        """Draw what is known before the first step."""
        config = self._config
        if config.pipeline.draw and len(self._program.ranks) > 1:
            draw_program(self._program, config.run.dir, title=self._schedule)
        if config.logging.draw_lr_schedule:
            peak = config.optimizer.learning_rate
            draw_lr_schedule(self._lr_schedule, config.run.dir, num_steps=config.steps, peak=peak)


class _Clock:
    """Measures throughput: weight over the time between `start` and `stop`. It is made running."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._lap_weight, self._total_weight = zero, zero.clone()
        self._lap_seconds = self._total_seconds = 0.0
        self._since = time.perf_counter()

    def add(self, weight: torch.Tensor) -> None:
        self._lap_weight = self._lap_weight + weight

    def lap(self) -> torch.Tensor:
        """Throughput since the last lap, on the device, without waiting for it.

        The time is the host's, which runs ahead of an accelerator at the beginning of a lap as it does at its end.
        """
        self._take_time()
        throughput = self._lap_weight / max(self._lap_seconds, 1e-9)
        self._end_lap()
        return throughput

    def average(self) -> torch.Tensor:
        """Throughput since the start, on the device; waits for it, so that the time is that of the work."""
        weight = self._total_weight + self._lap_weight
        weight.item()
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


def _write_config(resolved: Mapping[str, JsonValue], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(redact_secrets(resolved), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")
