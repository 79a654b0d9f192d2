"""A run with progress is never started at step 0, nor from another run's checkpoint, without a word."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from d9d_dist import MeshConfig, UserError, gather_json
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.job import start_messages
from d9d_metrics import read_metrics
from d9d_state import StateError

_DATA = [{"x": torch.full((3,), float(number)), "y": torch.ones(1)} for number in range(16)]


class _Regression(Task):
    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


def _trainer(folder: Path, /, *, steps: int = 4, run: dict[str, Any] | None = None, **checkpoint: Any) -> Trainer:
    values = {
        "steps": steps,
        "batch": {"global_size": 4},
        "run": {"folder": folder, **(run or {})},
        "checkpoint": {"every": 2, **checkpoint},
        "logging": {"every": 1, "progress": False, "report": False},
        "rehearsal": False,
        "resilience": {"health": {"enabled": False}},
    }
    config = TrainerConfig.model_validate(values)
    return Trainer(config, model=lambda stage: nn.Linear(3, 1), data=_DATA, task=_Regression())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs of a finished job of 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    _trainer(folder).train()
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def _steps(file: Path) -> list[float]:
    return [record["step"] for record in read_metrics(file)]


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _lose_journal_too(run: Path) -> None:
    _lose_checkpoints(run)
    (run / "journal.jsonl").unlink()


def _lose_all_but_the_figures(run: Path) -> None:
    _lose_journal_too(run)
    shutil.rmtree(run / "export")


@pytest.mark.parametrize(
    ("lose", "evidence"),
    [
        (_lose_checkpoints, "journal.jsonl: step 4 was saved"),
        (_lose_journal_too, "export/ has a trained model"),
        (_lose_all_but_the_figures, "metrics.jsonl: 4 steps"),
    ],
)
def test_progress_without_checkpoints_is_an_error(runs: Path, lose: Callable[[Path], None], evidence: str) -> None:
    lose(runs / "run")
    before = _contents(runs)
    message = rf"has progress \({re.escape(evidence)}\), but .*run/checkpoints has no checkpoint; expected the run's"
    with pytest.raises(UserError, match=message):
        _trainer(runs).train()
    assert _contents(runs) == before


def test_another_folder_of_checkpoints_is_an_error(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"but .*elsewhere/run has no checkpoint; .* and --checkpoint\.folder\."):
        _trainer(runs, folder=str(tmp_path / "elsewhere")).train()


def test_a_run_with_local_tiers_is_checked_when_they_have_no_checkpoint(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_loop.engine.local_tiers.MEMORY", tmp_path / "memory")
    _lose_checkpoints(runs / "run")
    with pytest.raises(UserError, match=r"step 4 was saved"):
        _trainer(runs, memory_every=1, replicas=0).train()


def test_a_start_from_scratch_on_request_keeps_figures_and_export(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _lose_checkpoints(runs / "run")
    before = _contents(runs / "run")
    _trainer(runs, steps=2, run={"from_scratch": True}).train()
    after = _contents(runs / "run")
    assert after["metrics-earlier-1.jsonl"] == before["metrics.jsonl"]
    assert after["export-earlier-1/model.safetensors"] == before["export/model.safetensors"]
    assert _steps(runs / "run" / "metrics.jsonl") == [1, 2]
    assert "starts from scratch." in capsys.readouterr().out
    _trainer(runs, steps=3, run={"from_scratch": True}).train()  # has no effect: there is a checkpoint
    assert "resumed from step 2 at " in capsys.readouterr().out
    assert not (runs / "run" / "metrics-earlier-2.jsonl").exists()


class _Crash(Exception):  # noqa: N818 - no error of this program
    pass


def _train_until(trainer: Trainer, step: int) -> None:
    def crash(done: StepDone) -> None:
        if done.step == step:
            raise _Crash

    trainer.events.on(StepDone, crash)
    with pytest.raises(_Crash):
        trainer.train()


def test_unsaved_steps_are_repeated_and_their_figures_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        _train_until(_trainer(tmp_path, every=4), 3)
    out = capsys.readouterr().out
    assert out.count("starts from scratch.") == 2
    assert "The 1 steps of the last start were not saved." in out  # the journal records the first step at once
    assert _steps(tmp_path / "run" / "metrics-after-step-0.jsonl") == [1, 2]


def test_each_start_says_from_where(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _trainer(runs, steps=5).train()
    place = (runs / "run" / "checkpoints" / "step-00000004").resolve()
    assert f"d9d: resumed from step 4 at {place}." in capsys.readouterr().out


def test_a_checkpoint_of_another_run_id_is_an_error(runs: Path, tmp_path: Path) -> None:
    _trainer(tmp_path / "other", steps=6).train()
    shutil.copytree(
        tmp_path / "other" / "run" / "checkpoints" / "step-00000006", runs / "run" / "checkpoints" / "step-00000006"
    )
    before = _contents(runs)
    with pytest.raises(UserError, match=r"is a checkpoint of run \w+, but the run in .* is \w+; .* --run\.adopt true"):
        _trainer(runs, steps=8).train()
    assert _contents(runs) == before
    adopted = _trainer(runs, steps=8, run={"adopt": True}).train()
    assert adopted.steps == 8
    _trainer(runs, steps=9).train()  # the run has the other id from now on


def test_a_step_in_a_local_tier_of_another_run_id_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("d9d_loop.engine.local_tiers.MEMORY", tmp_path / "memory")
    local: dict[str, Any] = {"every": 8, "memory_every": 1, "replicas": 0}
    _train_until(_trainer(tmp_path, **local), 3)
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text(re.sub(r'("run_id": )"\w+"', r'\1"another"', journal.read_text()))
    with pytest.raises(
        UserError, match=r"is a checkpoint of run \w+, but the run in .* is another; .* --run\.adopt true"
    ):
        _trainer(tmp_path, **local).train()
    _trainer(tmp_path, run={"adopt": True}, **local).train()
    assert "resumed from step 2 at " in capsys.readouterr().out


def test_two_runs_with_one_folder_of_checkpoints_do_not_mix(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    _trainer(tmp_path / "a", folder=shared, steps=2).train()
    with pytest.raises(UserError, match=r"is a checkpoint of the run in .*/a/run, but this run's folder is .*/b/run"):
        _trainer(tmp_path / "b", folder=shared).train()
    shutil.rmtree(tmp_path / "a")  # a host without its disk
    _trainer(tmp_path / "a", folder=shared).train()
    journal = (tmp_path / "a" / "run" / "journal.jsonl").read_text().splitlines()
    assert json.loads(journal[0])["step"] == 2


def test_a_moved_run_folder_resumes(runs: Path) -> None:
    (runs / "run").rename(runs / "moved")
    assert _trainer(runs, steps=5, run={"name": "moved"}).train().steps == 5


def test_too_few_hosts_for_replicas_end_a_job_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_loop.engine.local_tiers.MEMORY", tmp_path / "memory")
    trainer, steps = _trainer(tmp_path / "runs", memory_every=1), list[StepDone]()
    trainer.events.on(StepDone, steps.append)
    with pytest.raises(UserError, match=r"got replicas = 1 for .*; expected one folder per host"):
        trainer.train()
    assert not steps
    assert not list((tmp_path / "memory").iterdir())


def _start_with_unreadable_files(_: str) -> str:
    job: Any = mock.MagicMock()
    job.state.restored = None
    with MeshConfig(data_parallel_shard=-1).build() as job.ctx:
        failure = mock.patch.object(start_messages, "check_progress", side_effect=PermissionError("metrics.jsonl"))
        with failure, pytest.raises(StateError) as caught:
            start_messages.print_start(job)
        gather_json(None)
    return str(caught.value)


def test_earlier_files_that_the_main_process_cannot_read_end_all_ranks_together() -> None:
    first, second = run_ranks(_start_with_unreadable_files, "", world_size=2)
    assert "rank 0" in first
    assert first.endswith("cannot be read or kept: metrics.jsonl")
    assert second == first
