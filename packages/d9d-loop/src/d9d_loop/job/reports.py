"""Reports of training values: the progress display, the trackers and the job's record."""

import math
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from d9d_dist import ContextSplit, DistributedContext, UserError
from d9d_loop.engine.job_state import Record
from d9d_loop.engine.train_step import StepResult
from d9d_loop.job.flop_formula import FlopFormula
from d9d_loop.job.flop_meter import FlopMeter
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.progress import Progress
from d9d_loop.job.run_files import write_environment
from d9d_loop.report.run_report import write_report
from d9d_metrics import Metric, MetricCollector, ModelFlops, MultiTracker, Tracker, build_trackers, peak_flops
from d9d_metrics.peak_memory import peak_bytes
from d9d_metrics.trackers.values import Html, Tracked

_UNKNOWN_FLOPS = "it has videos, or images of another size than the first microbatch, or that has none"


class Reports:
    """Display and tracking of a job's values, without host-device synchronization in the training step.

    A `MetricCollector` reduces the values and copies them to the host in the background. The training thread issues the
    all-reduce, so every rank issues its collectives in the same order. Values are delivered in step order, at most two
    reports late. An evaluation, a save and the end of the job wait for pending values.

    On the main process, `__enter__` opens the trackers. `settle` updates the record. Each report resets this rank's
    task metrics.
    """

    def __init__(
        self,
        plan: JobPlan,
        *,
        record: Record,
        metrics: Mapping[str, Metric],
        ctx: DistributedContext,
        flops: FlopFormula | None = None,
    ) -> None:
        self._plan, self._config = plan, plan.config
        self.meter = FlopMeter(flops, plan.task, split=ContextSplit(ctx.mesh_for("batch")["cp"]))
        self._peak, self._is_told = plan.config.logging.peak_flops, False
        if self._peak is None:
            with suppress(UserError):  # the device is not in the table
                self._peak = peak_flops(ctx.device)
        # The ranks of the metric do not include tensor-parallel ones.
        self._flops = ModelFlops((0.0 if self._peak is None else self._peak) * ctx.size("batch", "tp")).to(ctx.device)
        self._record, self._metrics, self._ctx = record, metrics, ctx
        self._throughput_name = f"{plan.task.weight_unit}_per_second"
        self._open = ExitStack()
        self._tracker: Tracker = MultiTracker([])

    def __enter__(self) -> Self:
        """Open the trackers and the progress bar, and start to measure the throughput."""
        config, ctx = self._config, self._ctx
        self._started = datetime.now(UTC)
        with ExitStack() as opened:
            if ctx.is_main_process:
                self._tracker = build_trackers(config.trackers, config.run.dir)
                opened.callback(self._tracker.close)
                # Discard values tracked after the checkpoint, or all values if the run has no checkpoint yet.
                self._tracker.resume(self._record.step, self._record.tracker)
                self._tracker.log_config(self._plan.resolved)
                if config.logging.report:
                    opened.callback(self._write_report, config.run.dir)
            self.progress = Progress(
                num_steps=self._plan.steps,
                done=self._record.step,
                visible=ctx.is_main_process,
                device=ctx.device,
                bar=config.logging.progress,
            )
            opened.callback(self.progress.close)
            group = ctx.group_for("batch", "pp", "dp", "cp")
            metrics = self._metrics if self.meter.formula is None else {**self._metrics, "model_flops": self._flops}
            self._collector = opened.enter_context(MetricCollector(metrics, group, self._deliver, device=ctx.device))
            self._open = opened.pop_all()
        self._clock = _Clock(ctx.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Deliver the pending values, write and log the report, also of a failed job, and close the trackers."""
        self._open.__exit__(kind, error, at)

    def _write_report(self, folder: Path) -> None:
        """Write the environment and the report. Training does not depend on them, so errors are only printed."""
        try:
            write_environment(folder, self._ctx, started=self._started)
            self._tracker.flush()  # the report reads metrics.jsonl
            if (folder / "metrics.jsonl").is_file():
                page = write_report(folder).read_text(encoding="utf-8")
                self._tracker.log(self._record.step, {"report": Html(page)})
        except (OSError, ValueError) as error:
            print(f"d9d: {folder}/report.html could not be written: {error}", flush=True)

    def step(self, result: StepResult) -> None:
        """Count a step, and report its values if a report is due (collective). No host-device synchronization."""
        self.progress.step()
        self._clock.add(result.weight)
        step, every, device = self._record.step, self._config.logging.every, self._ctx.device
        if step % every and step not in (1, self._plan.steps):
            return
        throughput, seconds = self._clock.lap()
        self._flops.update(self.meter.take(), seconds)
        values = {
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            self._throughput_name: throughput,
            "peak_memory_gib": torch.full((), peak_bytes(device) / 2**30, dtype=torch.float64, device=device),
        }
        self._collector.collect(step, values)

    def not_training(self) -> AbstractContextManager[None]:
        """Exclude the time of the body from the throughput. Synchronizes host and device."""
        return self._clock.stopped()

    def evaluation(self) -> None:
        """Report the evaluation results of the record, after delivering pending values."""
        values = self._record.evaluation
        self._collector.flush()
        self._tracker.log(self._record.step, {f"evaluation_{name}": value for name, value in values.items()})
        self.progress.evaluation(self._record.step, values)

    def track(self, values: Mapping[str, Tracked]) -> None:
        """Track additional values for the record's step."""
        self._tracker.log(self._record.step, values)

    def on_rollback(self) -> None:
        """Set trackers and progress bar back to the record's step after a rollback, discarding later tracked values."""
        self._collector.flush()
        self._tracker.resume(self._record.step, self._record.tracker)
        self.progress.go_to(self._record.step)

    def settle(self, result: StepResult) -> None:
        """Update the record before a save: training loss, throughput and tracker state.

        Collective: a broadcast of the main process's throughput. Synchronizes host and device.
        """
        with self.not_training():
            throughput = self._clock.average()
            if self._ctx.world_size > 1:
                dist.broadcast(throughput, src=0)
            self._record.weight_per_second = throughput.item()
            self._record.train_loss = result.loss.item()
            self._record.learning_rate = result.learning_rate / self._record.rate_factor  # that of the schedule
            self.flush()

    def flush(self) -> None:
        """Make all values durable, and update the trackers' state in the record."""
        self._collector.flush()
        self._tracker.flush()
        self._record.tracker = self._tracker.state_dict()

    def _deliver(self, step: int, values: Mapping[str, float]) -> None:
        """Pass values to the tracker and the progress bar, in the collector's thread."""
        values = {name.removeprefix("model_flops/"): value for name, value in values.items()}
        if math.isnan(values.get("flops_per_second", 0.0)):  # images of another size than measured, or videos
            if not self._is_told:
                print(f"d9d: model FLOPs of step {step} are not counted: {_UNKNOWN_FLOPS}.", flush=True)
            self._is_told = True
            values = {name: value for name, value in values.items() if name not in {"flops_per_second", "mfu"}}
        if self._peak is None:
            values.pop("mfu", None)
        self._tracker.log(step, values)
        self.progress.values(step, values)


class _Clock:
    """Throughput meter: step weight, such as tokens, per second of running time. Measurement starts at construction."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._lap_weight, self._total_weight = zero, zero.clone()
        self._lap_seconds = self._total_seconds = 0.0
        self._since = time.perf_counter()

    def add(self, weight: torch.Tensor) -> None:
        self._lap_weight = self._lap_weight + weight

    def lap(self) -> tuple[torch.Tensor, float]:
        """Return the throughput since the last lap as a device tensor, and its seconds; begin a new lap.

        No host-device synchronization: time is measured on the host, which is about equally far ahead of the device at
        the start and the end of a lap.
        """
        self._take_time()
        seconds = max(self._lap_seconds, 1e-9)
        throughput = self._lap_weight / seconds
        self._total_weight = self._total_weight + self._lap_weight
        self._total_seconds += self._lap_seconds
        self._lap_weight, self._lap_seconds = torch.zeros_like(self._lap_weight), 0.0
        return throughput, seconds

    def average(self) -> torch.Tensor:
        """Return the throughput over the total running time as a device tensor. The meter must be stopped."""
        return (self._total_weight + self._lap_weight) / max(self._total_seconds + self._lap_seconds, 1e-9)

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Exclude the time of the body. Wait for the device first, because the time of its pending work counts."""
        self._lap_weight.item()
        self._take_time()
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def _take_time(self) -> None:
        now = time.perf_counter()
        self._lap_seconds += now - self._since
        self._since = now
