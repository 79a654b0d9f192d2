"""Profiler of selected steps of a job: a trace for each rank, and a summary of the times on all ranks."""

from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
from torch.profiler import profile

from d9d_dist import DistributedContext, gather_json
from d9d_loop.config.trainer_config import ProfileConfig
from d9d_loop.event_bus import on_event
from d9d_loop.events import DataReady, StepDone
from d9d_loop.job.time_breakdown import TimeBreakdown, break_down, spans_of

_TOP_OPERATORS = 15


@final
class Profiler:
    """Profiler of ranges of steps: a compressed trace per rank and a summary of all ranks for each range.

    The folder of a range is named after its last step, such as `profile/step-00000010`. It contains
    `rank-00000.json.gz`, for Perfetto or `chrome://tracing`, and `summary.md`. If the job ends or is stopped within a
    range, the completed steps of the range are written. After a rollback into a range, only the steps
    after the rollback are written.
    """

    def __init__(self, config: ProfileConfig, folder: Path, ctx: DistributedContext, *, num_steps: int) -> None:
        self._config, self._folder, self._ctx, self._num_steps = config, folder, ctx, num_steps
        self._running: profile | None = None
        self._first_step = self._last_step = 0  # of the current range
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write the completed steps of the current range (collective); after an error, discard them."""
        if error is None and self._running is not None and self._step >= self._first_step:
            self._end_profile()
        self._discard_profile()

    @on_event(DataReady, StepDone)
    def step(self, event: DataReady | StepDone) -> None:
        """End the range if this is its last step (collective: writes the profile), and start a range if one is due."""
        self._step = event.step
        if self._running is not None and event.step == self._last_step:
            self._end_profile()
        self._begin_profile()

    def on_rollback(self, step: int) -> None:
        """Discard the recorded steps after a rollback to `step`; restart the range if it includes the next step."""
        self._step = step
        is_inside = self._running is not None and self._first_step <= step + 1
        self._discard_profile()
        if is_inside:
            self._start(step + 1, self._last_step)
        self._begin_profile()

    def _begin_profile(self) -> None:
        if self._running is None and self._config.begins_after(self._step) and self._step < self._num_steps:
            self._start(self._step + 1, min(self._step + self._config.steps, self._num_steps))

    def _start(self, first_step: int, last_step: int) -> None:
        self._first_step, self._last_step = first_step, last_step
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        names = ("CPU", self._ctx.device.type.upper())
        self._running = profile(
            activities=[kind for kind in torch.profiler.supported_activities() if kind.name in names],
            record_shapes=self._config.record_shapes,
            profile_memory=self._config.profile_memory,
            acc_events=True,
        )
        self._running.start()

    def _end_profile(self) -> None:
        assert self._running is not None
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._running.stop()
        self._write(self._running)
        self._running = None

    def _discard_profile(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _write(self, done: profile) -> None:
        folder = self._folder / "profile" / f"step-{self._step:08}"
        folder.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(folder / f"rank-{self._ctx.rank:05}.json.gz"))
        events = done.events()
        compute, communication = spans_of(events)
        times = [moment for event in events for moment in (event.time_range.start / 1e6, event.time_range.end / 1e6)]
        own = break_down(compute, communication, total=(min(times, default=0.0), max(times, default=0.0)))
        ranks = [TimeBreakdown(**each) for each in gather_json(asdict(own))]
        if self._ctx.is_main_process:
            sort_by = "self_cpu_time_total" if self._ctx.device.type == "cpu" else "self_device_time_total"
            operators = done.key_averages().table(sort_by=sort_by, row_limit=_TOP_OPERATORS)
            text = _summary(ranks, operators, first_step=self._first_step, last_step=self._step)
            (folder / "summary.md").write_text(text, encoding="utf-8")


def _summary(ranks: list[TimeBreakdown], operators: str, *, first_step: int, last_step: int) -> str:
    lines = [
        f"# Steps {first_step} to {last_step}",
        "",
        "Milliseconds per rank; profiling slows a CPU down. Overlapping times are counted once.",
        "Exposed: communication without overlapping computation. Idle: neither, for example waiting for data, host or "
        "ranks.",
        "",
        "| rank | total | compute | communication | exposed | idle |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {rank} | " + " | ".join(f"{seconds * 1e3:.2f}" for seconds in asdict(times).values()) + " |"
        for rank, times in enumerate(ranks)
    ]
    return "\n".join([*lines, "", "Operators of rank 0:", "", "```", operators.strip(), "```", ""])
