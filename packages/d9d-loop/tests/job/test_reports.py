import errno
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from d9d_dist import DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import TrainerConfig, validate_config
from d9d_loop.engine.job_state import Record
from d9d_loop.engine.train_step import StepResult
from d9d_loop.job.reports import Reports
from d9d_metrics import MultiTracker, Sum, read_metrics
from d9d_metrics.trackers.values import Html


class _Time:
    """Clock that advances only on request."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    time = _Time()
    monkeypatch.setattr("d9d_loop.job.reports.time", time)
    return time


def _config(folder: Path, **sections: Any) -> TrainerConfig:
    values = {"steps": 10, "batch": {"global_size": 8}, "run": {"folder": folder}, "logging": {"every": 3}}
    return validate_config(TrainerConfig, {**values, **sections})


def _outcome(step: int, *, weight: float = 6.0) -> StepResult:
    return StepResult(
        loss=torch.tensor(1.0 / step, dtype=torch.float64),
        weight=torch.tensor(weight, dtype=torch.float64),
        grad_norm=torch.tensor(2.0),
        taken=torch.tensor(True),
        learning_rate=0.5,
    )


class _Run:
    """Simulate a job whose steps take two seconds each."""

    def __init__(self, config: TrainerConfig, ctx: DistributedContext, time: _Time, step: int = 0) -> None:
        self.config, self.time = config, time
        self.record = Record(step)
        self.total = Sum()
        task = SimpleNamespace(weight_unit="tokens")
        plan: Any = SimpleNamespace(config=config, resolved={"steps": 10}, steps=config.steps or 0, task=task)
        self.reports = Reports(plan, record=self.record, metrics={"total": self.total}, ctx=ctx)

    def steps(self, count: int) -> StepResult:
        outcome = _outcome(1)
        for _ in range(count):
            self.time.now += 2
            self.record.step += 1
            self.total.update(1.0)
            outcome = _outcome(self.record.step)
            self.reports.step(outcome)
        return outcome

    def lines(self) -> list[dict[str, float]]:
        lines = read_metrics(self.config.run.dir / "metrics.jsonl")
        for line in lines:
            del line["time"]
            assert "loss" not in line or 0.01 < line.pop("peak_memory_gib") < 1000
        return lines


def test_reports_the_first_the_last_and_every_nth_step(tmp_path: Path, ctx: DistributedContext, time: _Time) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with run.reports:
        run.steps(10)
    assert run.lines() == [
        {
            "step": step,
            "loss": 1.0 / step,
            "learning_rate": 0.5,
            "grad_norm": 2.0,
            "tokens_per_second": 3.0,
            "total": total,
        }
        for step, total in [(1, 1.0), (3, 2.0), (6, 3.0), (9, 3.0), (10, 1.0)]
    ]


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_the_report_reaches_the_trackers_before_they_close(
    tmp_path: Path, ctx: DistributedContext, time: _Time, error: Exception | None
) -> None:
    run, calls = _Run(_config(tmp_path), ctx, time), list[Any]()

    def recorded(method: Any) -> Any:
        return lambda *given: (calls.append(given[1:]), method(*given))[1]

    with (
        mock.patch.object(MultiTracker, "log", recorded(MultiTracker.log)),
        mock.patch.object(MultiTracker, "close", recorded(MultiTracker.close)),
        pytest.raises(ZeroDivisionError) if error else nullcontext(),
        run.reports,
    ):
        run.steps(4)
        if error:
            raise error
    page = Html((run.config.run.dir / "report.html").read_text(encoding="utf-8"))
    assert calls[-2:] == [(4, {"report": page}), ()]


def test_values_after_the_resumed_step_are_discarded(tmp_path: Path, ctx: DistributedContext, time: _Time) -> None:
    first = _Run(_config(tmp_path), ctx, time)
    with first.reports:
        first.steps(7)
    second = _Run(_config(tmp_path), ctx, time, step=5)
    with second.reports:
        assert [line["step"] for line in second.lines()] == [1, 3]
        second.steps(5)
    assert [line["step"] for line in second.lines()] == [1, 3, 6, 9, 10]


def test_evaluations_and_checkpoints_do_not_count_as_training_time(
    tmp_path: Path, ctx: DistributedContext, time: _Time
) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with run.reports:
        run.steps(2)
        with run.reports.not_training():
            time.now += 50
        outcome = run.steps(3)
        run.reports.settle(outcome)
        with run.reports.not_training():
            time.now += 500
        run.steps(1)
    assert [line["tokens_per_second"] for line in run.lines()] == [3.0, 3.0, 3.0]
    assert run.record.weight_per_second == 3.0


def test_settle_updates_loss_and_throughput_of_the_record(tmp_path: Path, ctx: DistributedContext, time: _Time) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with run.reports:
        run.reports.settle(run.steps(4))
        assert (run.record.train_loss, run.record.weight_per_second) == (0.25, 3.0)
        time.now += 8
        run.reports.settle(run.steps(4))
        assert (run.record.train_loss, run.record.weight_per_second) == (0.125, 2.0)


def test_evaluations_are_tracked_and_shown(
    tmp_path: Path, ctx: DistributedContext, time: _Time, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with run.reports:
        run.steps(2)
        run.record.evaluation = {"loss": 0.5, "accuracy": 0.25}
        run.reports.evaluation()
    assert run.lines()[-1] == {"step": 2, "evaluation_loss": 0.5, "evaluation_accuracy": 0.25}
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["held-out", "loss", "accuracy"],
        ["step", "2", "0.5000", "0.2500"],
    ]


def test_only_the_main_process_writes(
    tmp_path: Path, ctx: DistributedContext, time: _Time, capsys: pytest.CaptureFixture[str]
) -> None:
    ctx.rank = 1
    run = _Run(_config(tmp_path / "runs"), ctx, time)
    with run.reports:
        run.steps(3)
        run.reports.evaluation()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_nothing_is_written_before_entering(tmp_path: Path, ctx: DistributedContext, time: _Time) -> None:
    before = threading.active_count()
    run = _Run(_config(tmp_path / "runs"), ctx, time)
    assert list(tmp_path.iterdir()) == []
    with mock.patch("d9d_loop.job.reports.build_trackers", side_effect=UserError), pytest.raises(UserError):
        run.reports.__enter__()
    assert threading.active_count() == before


def test_a_failed_job_has_a_report_and_an_entry_for_each_life(
    tmp_path: Path, ctx: DistributedContext, time: _Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--hub.token", "canary"])
    for _ in range(2):
        run = _Run(_config(tmp_path), ctx, time)
        with pytest.raises(RuntimeError, match="lost"), run.reports:
            raise RuntimeError("lost")
    lives = json.loads((tmp_path / "run" / "environment.json").read_text())["lives"]
    assert [life["command"] for life in lives] == [["train.py", "--hub.token", "<redacted>"]] * 2
    assert {"started", "ended", "host", "commit", "torch"} <= lives[0].keys()
    assert (tmp_path / "run" / "report.html").exists()


def test_a_full_disk_does_not_erase_the_report_and_the_lives(
    tmp_path: Path, ctx: DistributedContext, time: _Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with _Run(_config(tmp_path), ctx, time).reports:
        pass
    files = [tmp_path / "run" / name for name in ("environment.json", "report.html")]
    before = [file.read_bytes() for file in files]

    def write_a_part(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:10].encode(encoding))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(Path, "write_text", write_a_part), _Run(_config(tmp_path), ctx, time).reports:
        pass
    assert "report.html could not be written: [Errno 28] No space left" in capsys.readouterr().out
    assert [file.read_bytes() for file in files] == before


def test_a_report_that_cannot_be_written_does_not_fail_the_job(
    tmp_path: Path, ctx: DistributedContext, time: _Time, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with run.reports:
        run.steps(1)
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write("damaged\n")
    assert "report.html could not be written: got b'damaged' in line" in capsys.readouterr().out


def _throughput(folder: Path) -> tuple[float, float | None]:
    """Return this rank's throughput, and that of the record."""
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        time = _Time()
        time.now *= 1 + ctx.rank
        with mock.patch("d9d_loop.job.reports.time", time):
            run = _Run(_config(folder), ctx, time)
            with run.reports:
                outcome = run.steps(2)
                time.now += 2 * ctx.rank
                run.reports.settle(outcome)
    return 12 / (4 + 2 * ctx.rank), run.record.weight_per_second


def test_ranks_report_the_throughput_of_the_main_process(tmp_path: Path) -> None:
    assert run_ranks(_throughput, tmp_path, world_size=2) == [(3.0, 3.0), (2.0, 3.0)]


def test_trackers_are_closed_when_a_job_fails(tmp_path: Path, ctx: DistributedContext, time: _Time) -> None:
    run = _Run(_config(tmp_path), ctx, time)
    with pytest.raises(RuntimeError, match="lost"), run.reports:
        raise RuntimeError("lost")
    with pytest.raises(ValueError, match="is closed"):
        run.reports.evaluation()
