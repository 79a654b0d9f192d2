"""Commands at the end of a job run once, know the status, and never change the result of the job."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_loop import Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.job.end_command import run_command
from d9d_loop.job.journal import Journal
from d9d_state import StateError

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
        "resilience": {"health": {"enabled": False}},
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


def test_an_error_before_the_first_step_runs_the_command(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises((UserError, OSError, StateError)) as error:
        _trainer(tmp_path, on_failure="echo $D9D_STATE: $D9D_ERROR >> $D9D_RUN/said").train()
    assert (tmp_path / "run" / "said").read_text().startswith(f"failed: {type(error.value).__name__}: ")


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
