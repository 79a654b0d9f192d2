"""Commands at the end of a job run once, know the status, and never change the result of the job."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop import Loss, ModelReady, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.config.trainer_config import RunConfig
from d9d_loop.job.end_command import report_early_failure, run_command
from d9d_loop.job.journal import Journal
from d9d_loop.report.run_status import read_status, write_failure
from d9d_loop.resilience.node_files import forget_ranks
from d9d_state import StateError
from d9d_state.folder_lock import locked_folder

_SAY = 'echo "$D9D_STATE $D9D_STEP of $D9D_STEPS, saved $D9D_SAVED: $D9D_ERROR" >> "$D9D_RUN/said"'


class _Regression(Task):
    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss(outputs.square().sum(), weight=len(outputs))


def _trainer(folder: Path, **commands: str) -> Trainer:
    values = {
        "steps": 2,
        "batch": {"global_size": 1},
        "run": {"folder": folder, **commands},
        "checkpoint": {"every": 1},
        "export": False,
        "rehearsal": False,
        "resilience": {"health": {"enabled": False}, "timeouts": {"lock_seconds": 0}},
    }
    config = TrainerConfig.model_validate(values)
    return Trainer(config, model=nn.Linear(1, 1), data=[{"x": torch.ones(1)}] * 2, task=_Regression())


def test_a_completed_job_runs_its_command(tmp_path: Path) -> None:
    _trainer(tmp_path, on_completion=_SAY, on_failure="echo no >> $D9D_RUN/said").train()
    assert (tmp_path / "run" / "said").read_text() == "finished 2 of 2, saved 2: \n"


def test_a_failed_job_runs_its_command_whose_failure_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = _trainer(tmp_path, on_failure=f"{_SAY}; echo token=canary; exit 3")

    def fail(_done: StepDone) -> None:
        raise KeyError("https://me:canary@host")

    trainer.events.on(StepDone, fail)
    with pytest.raises(KeyError):
        trainer.train()
    said = (tmp_path / "run" / "said").read_text()
    assert said.startswith("failed 0 of 2, saved 0: KeyError: 'https://<redacted>@host'")
    assert "d9d: the command for state 'failed' failed: exit code 3.\n" in capfd.readouterr().err


def test_an_error_while_the_job_is_built_is_in_the_status(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)

    def fail(_ready: ModelReady) -> None:
        raise KeyError("x")

    trainer.events.on(ModelReady, fail)
    with pytest.raises(KeyError):
        trainer.train()
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status["state"], status["error"].partition("\n")[0]) == ("failed", "KeyError: 'x'")


def test_a_folder_in_use_does_not_change_the_status_of_the_other_job(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, on_failure="echo $D9D_ERROR > $D9D_RUN/said")
    trainer.train()
    before = (tmp_path / "run" / "status.json").read_bytes()
    with locked_folder(tmp_path / "run" / "checkpoints"), pytest.raises(StateError, match="in use by another job"):
        trainer.train()
    assert (tmp_path / "run" / "status.json").read_bytes() == before
    assert "in use by another job" in (tmp_path / "run" / "said").read_text()


def test_a_failure_before_the_start_is_recorded_runs_the_command_again(tmp_path: Path, ctx: DistributedContext) -> None:
    first = Journal(tmp_path, ctx)
    first.started(0, "id")
    with (tmp_path / "journal.jsonl").open("a") as file:  # of another rank, in the last life
        file.write('{"event": "failed", "time": 1.0, "rank": 1, "host": "a", "cause": "x"}\n')
    Journal(tmp_path, ctx, on_failure="echo $D9D_ERROR > $D9D_RUN/said").failed("another model")
    assert (tmp_path / "said").read_text() == "another model\n"


def test_an_error_before_the_first_step_runs_the_command(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises((UserError, OSError, StateError)) as error:
        _trainer(tmp_path, on_failure="echo $D9D_STATE: $D9D_ERROR >> $D9D_RUN/said").train()
    assert (tmp_path / "run" / "said").read_text().startswith(f"failed: {type(error.value).__name__}: ")


def test_an_error_of_the_plan_runs_the_command_and_creates_no_folder(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, on_failure=f"echo $D9D_RANK, $D9D_STATE: $D9D_ERROR >> {tmp_path}/said")
    without_data = Trainer(trainer._config, model=nn.Linear(1, 1), data=[], task=_Regression())
    with pytest.raises(UserError):
        without_data.train()
    assert (tmp_path / "said").read_text().startswith("0, failed: UserError: ")
    assert not (tmp_path / "run").exists()


def test_the_first_failing_rank_of_a_node_reports_an_early_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(folder=tmp_path, on_failure=f"echo $D9D_RANK >> {tmp_path}/said")
    report_early_failure(run, 1, ValueError(), writes_status=False)
    assert not (tmp_path / "said").exists(), "without a launcher that has a folder, rank 0 reports"
    (tmp_path / "node").mkdir()
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path / "node"))
    for rank in (1, 0):
        report_early_failure(run, rank, ValueError(), writes_status=False)
    forget_ranks()  # the launcher restarts the ranks
    report_early_failure(run, 2, ValueError(), writes_status=False)
    assert (tmp_path / "said").read_text() == "1\n2\n"


def test_a_failure_that_cannot_be_recorded_runs_the_command_on_rank_0(tmp_path: Path, ctx: DistributedContext) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    Journal(tmp_path, ctx, on_failure="echo $D9D_ERROR >> $D9D_RUN/said").failed("a full disk")
    assert (tmp_path / "said").read_text() == "a full disk\n"


def test_the_status_keeps_the_first_error_of_a_start(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx)
    journal.started(0, "id")
    write_failure(tmp_path, "KeyError on rank 1")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "failed", "time": 1.0, "rank": 1, "host": "a", "cause": "KeyError on rank 1"}\n')
    journal.failed("a victim")
    assert (read_status(tmp_path) or {})["error"] == "KeyError on rank 1"


def test_only_the_first_failure_after_a_start_runs_the_command(tmp_path: Path, ctx: DistributedContext) -> None:
    command = "echo $D9D_RANK: $D9D_ERROR >> $D9D_RUN/said"
    journal = Journal(tmp_path, ctx, on_failure=command)
    for _ in range(2):
        journal.started(0, "id")
        with (tmp_path / "journal.jsonl").open("a") as file:
            file.write('{"event": "failed", "time": 1.0, "rank": 1, "host": "a", "cause": "x"}\n')
        journal.failed("a victim")
    assert not (tmp_path / "said").exists()
    journal.started(0, "id")
    journal.failed("the first")
    assert (tmp_path / "said").read_text() == "0: the first\n"


def test_a_command_that_cannot_start_or_takes_too_long_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command("true", tmp_path, state="failed", error="a\0b")
    assert "failed: ValueError." in capsys.readouterr().err
    monkeypatch.setattr("d9d_loop.job.end_command._SECONDS", 0.01)
    run_command("sleep 5", tmp_path, state="failed")
    assert "failed: TimeoutExpired." in capsys.readouterr().err
