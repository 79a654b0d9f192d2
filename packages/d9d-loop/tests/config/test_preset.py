import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop import InferencePresetConfig, StepDone, preset_inference, read_config_file, validate_config
from d9d_loop.__main__ import main
from d9d_loop.config.preset import PresetConfig, look_beside_preset
from d9d_loop.preset_job import preset_trainer
from d9d_loop.result import export_adapters

REHEARSES = True  # see quick_jobs.py

_PROJECT = """
import sys
import torch
from torch import nn
from d9d_loop import FunctionProvider, InferenceTask, Loss, StepDone, Task, on_event

def net(width: int):
    return FunctionProvider(lambda stage: nn.Linear(width, 1))

class Regression(Task):
    def inputs(self, batch):
        return {"input": batch["x"]}
    def loss(self, outputs, batch):
        return Loss(outputs.square().sum(), weight=len(outputs))

def samples(size: int, width: int):
    return [{"x": torch.ones(width) * index} for index in range(size)]

class Sum(InferenceTask):
    def inputs(self, batch):
        return {"input": batch["x"]}
    def results(self, outputs, batch):
        return batch["x"].sum(1).tolist()

def sgd(lr: float):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)

def halving(every: int):
    return lambda step: 0.5 ** (step // every)

class Watcher:
    def __init__(self, word: str):
        self.word = word
    @on_event(StepDone)
    def look(self, event):
        sys.stdout.write(f"{self.word} {event.step}\\n")  # in one piece: another thread prints the metrics
"""

_PRESET = """
steps = 2
batch.global_size = 4
export = false
logging.progress = false
model = {use = "PROJECT:net", width = 3}
task = {use = "PROJECT:Regression"}
dataset = {use = "PROJECT:samples", size = 8, width = 3}
evaluation_dataset = {use = "PROJECT:samples", size = 2, width = 3}
subscribers = [{use = "PROJECT:Watcher", word = "seen"}]
"""


def _write(folder: Path, project: str) -> Path:
    (folder / f"{project}.py").write_text(_PROJECT, encoding="utf-8")
    preset = folder / "job.toml"
    preset.write_text(_PRESET.replace("PROJECT", project), encoding="utf-8")
    return preset


@pytest.mark.full
@pytest.mark.long
def test_a_preset_file_starts_a_job_without_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = _write(tmp_path, "preset_of_a_command")
    arguments = [str(preset), "--dataset.size", "12", "--run.name", "named", "--logging.stamps", "false"]
    command = [sys.executable, "-m", "d9d_loop", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("seen")] == ["seen 1", "seen 2"]
    assert "TrainResult(steps=2" in done.stdout
    config = json.loads((tmp_path / "runs" / "named" / "config.json").read_text())
    assert config["dataset"] == {"use": "preset_of_a_command:samples", "size": "12", "width": 3}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["d9d-train", *arguments, "--model.use", "nowhere:net"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()
    assert capsys.readouterr().err.startswith("d9d: model.use = 'nowhere:net': no module named nowhere.")
    monkeypatch.setattr(sys, "argv", ["d9d-train", *arguments, "--plan.hardware", "h1000"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()
    assert "got the hardware 'h1000'; expected one of" in capsys.readouterr().err


def test_a_checkpoint_of_a_preset_is_exported_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = read_config_file(_write(tmp_path, "preset_of_an_export"))
    preset_trainer(validate_config(PresetConfig, {**values, "optimizer": {"learning_rate": 0.1}})).train()
    module = import_module("preset_of_an_export")
    monkeypatch.setattr(module, "samples", lambda size, width: pytest.fail("the data are read"))
    export_adapters.main(["runs/run", "--step", "2"])
    assert (tmp_path / "runs" / "run" / "step-2" / "export" / "model.safetensors").is_file()


def test_presets_are_validated_like_other_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    values = read_config_file(_write(tmp_path, "preset_of_a_test"))
    with pytest.raises(UserError, match="modle is not a configuration key; did you mean model"):
        validate_config(PresetConfig, {**values, "modle": {}})
    del values["task"]
    with pytest.raises(UserError, match=r"^task\.use is missing"):
        validate_config(PresetConfig, values)
    values["task"] = {"use": "preset_of_a_test:Regression", "size": 3}
    with pytest.raises(UserError, match=r"^task: preset_of_a_test:Regression cannot be called with size: "):
        preset_trainer(validate_config(PresetConfig, values))


def test_components_are_built_from_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    values = read_config_file(_write(tmp_path, "preset_of_parts")) | {"run": {"folder": str(tmp_path)}}
    trainer, steps = preset_trainer(validate_config(PresetConfig, values)), []
    trainer.events.on(StepDone, lambda event: steps.append(event.step))
    assert trainer.train().steps == 2
    assert steps == [1, 2]


def test_a_preset_selects_functions_for_optimizer_and_lr_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    values = read_config_file(_write(tmp_path, "preset_of_providers")) | {"run": {"folder": str(tmp_path)}}
    values["optimizer_provider"] = {"use": "preset_of_providers:sgd", "lr": "0.25"}
    values["lr_schedule_provider"] = {"use": "preset_of_providers:halving", "every": 1}
    trainer, rates = preset_trainer(validate_config(PresetConfig, values)), []
    trainer.events.on(StepDone, lambda event: rates.append(event.learning_rate))
    trainer.train()
    assert rates == [0.25, 0.125]
    values["optimizer_provider"] = {"use": "preset_of_providers:sgd", "lr": "fast"}
    with pytest.raises(UserError, match=r"^optimizer_provider\.lr = 'fast'; expected a valid number"):
        preset_trainer(validate_config(PresetConfig, values))


def test_a_preset_file_starts_an_inference_without_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    values = read_config_file(_write(tmp_path, "preset_of_inference"))
    kept = {key: values[key] for key in ("model", "dataset")}
    task = {"use": "preset_of_inference:Sum"}
    run = {"batch_size": 4, "run": {"folder": str(tmp_path)}, "logging": {"progress": False}}
    config = validate_config(InferencePresetConfig, {**kept, **run, "task": task})
    result = preset_inference(config).run()
    assert [float(line) for line in result.file.read_text().splitlines()] == [3.0 * index for index in range(8)]


def test_modules_beside_the_preset_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["before"])
    look_beside_preset(["--run.name", "other.toml", "jobs/job.toml"])
    assert sys.path == [str(tmp_path), str(tmp_path / "jobs"), "before"]
    look_beside_preset([])
    assert sys.path == [str(tmp_path), str(tmp_path / "jobs"), "before"]
