import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from d9d_dist import UserError
from d9d_loop import AdamWConfig, TrainerConfig
from d9d_loop.config.config_source import parse_command_line, validate_config
from d9d_loop.optimizers.optimizer import OptimizerConfig, SGDConfig

JOB = {"steps": 3, "batch": {"global_size": 8}}


def _parse(*words: str, file: Path | None = None) -> TrainerConfig:
    return parse_command_line(TrainerConfig, file, words)


def _values(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    default, other = tmp_path / "default.json", tmp_path / "other.json"
    default.write_text(json.dumps(JOB), encoding="utf-8")
    other.write_text(json.dumps({**JOB, "steps": 5}), encoding="utf-8")
    assert _parse(file=default).steps == 3
    assert _parse(str(other), file=default).steps == 5
    config = _parse("--steps", "7", str(other), "--batch.global_size=16", file=default)
    assert (config.steps, config.batch.global_size) == (7, 16)


def test_overrides_support_every_type() -> None:
    config = _parse(
        *("--steps", "3", "--batch.global_size", "8", "--mesh.data_parallel_shard", "-1", "--logging.progress=false"),
        *("--optimizer.betas", "[0.5, 0.75]", "--checkpoint.keep_last", "null", "--run.folder", "a=b/c", "--seed="),
        *("--seed", "4", '--trackers=[{kind = "jsonl", file = "m"}, {kind = "console"}]', "--lr_schedule={}"),
    )
    assert _values(config.trackers[0]) == {"kind": "jsonl", "file": "m"}
    assert _values(config.trackers[1]) == {"kind": "console"}
    assert isinstance(config.optimizer, AdamWConfig)
    assert (config.optimizer.betas, config.checkpoint.keep_last) == ((0.5, 0.75), None)
    assert (config.mesh.data_parallel_shard, config.logging.progress, config.seed) == (-1, False, 4)
    assert config.run.folder == Path("a=b/c")


def test_another_kind_on_the_command_line_replaces_the_section_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    muon = {"kind": "muon", "momentum": 0.5, "learning_rate": 0.1}
    file.write_text(json.dumps({**JOB, "optimizer": muon}), encoding="utf-8")
    config = _parse(str(file), "--optimizer.learning_rate", "0.3", "--optimizer.kind", "sgd")
    assert _values(config.optimizer) == {**_values(SGDConfig()), "learning_rate": 0.3}


def test_a_section_without_kind_has_the_default_kind(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({**JOB, "optimizer": {"betas": [0.5, 0.75], "eps": 1e-6}}), encoding="utf-8")
    assert _parse(str(file), "--optimizer.kind", "sgd").optimizer == SGDConfig()
    config = _parse(str(file), "--optimizer.kind", "adamw").optimizer
    assert config == AdamWConfig(betas=(0.5, 0.75), eps=1e-6)


def test_no_kind_is_added_without_an_override(tmp_path: Path) -> None:
    class Sgd(TrainerConfig):
        optimizer: OptimizerConfig = SGDConfig()

    file = tmp_path / "job.json"
    file.write_text(json.dumps({**JOB, "optimizer": {"learning_rate": 0.5}}), encoding="utf-8")
    parsed = parse_command_line(Sgd, file, ["--optimizer.weight_decay", "0.25"])
    assert parsed == validate_config(Sgd, {**JOB, "optimizer": {"learning_rate": 0.5, "weight_decay": 0.25}})


def test_a_list_may_be_written_as_json() -> None:
    config = _parse("--steps=1", "--batch.global_size=8", '--trackers=[{"kind": "console"}]')
    assert [tracker.kind for tracker in config.trackers] == ["console"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps"], "--steps has no value; expected --steps VALUE."),
        (["--steps", "--seed", "1"], "--steps has no value; expected --steps VALUE."),
        (["--steps.x", "1"], "--steps.x: steps is a value, not a section."),
        (
            ["a.toml", "b.toml"],
            "got the arguments 'a.toml' and 'b.toml'; expected one configuration file, then --key VALUE.",
        ),
        (
            ["--optimizer.betas", "[0.5"],
            "optimizer.betas = '[0.5'; expected a valid tuple. Change it in the "
            "configuration file, or with --optimizer.betas VALUE.",
        ),
        (
            ["--batch", "8"],
            "batch = '8'; expected a valid dictionary or instance of BatchConfig. Change it in the "
            "configuration file, or with --batch VALUE.",
        ),
        (["--optimzer.learning_rate", "1"], "optimzer is not a configuration key; did you mean optimizer?"),
        (
            ["--seed", "null"],
            "seed = None; expected a valid integer. Change it in the configuration file, or with --seed VALUE.",
        ),
    ],
)
def test_refuses_a_bad_command_line(tmp_path: Path, words: list[str], message: str) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(JOB), encoding="utf-8")
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        _parse(*words, file=file)


def test_reads_the_arguments_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "9", "--batch.global_size", "8"])
    assert parse_command_line(TrainerConfig, None, None).steps == 9


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_printed_without_reading_anything(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse("absent.toml", word)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: [FILE] [--section.key VALUE ...]\n")


def test_the_schema_is_printed_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse("--schema")
    assert stop.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    check = jsonschema.Draft202012Validator(schema)
    assert not list(check.iter_errors({"include": ["base.toml"], "steps": 3, "optimizer": {"learning_rate": 0.1}}))
    (error,) = check.iter_errors({"steps": 0})
    assert list(error.path) == ["steps"]
    (error,) = check.iter_errors({"stpes": 1})
    assert "stpes" in error.message
    assert schema["properties"]["steps"]["description"].startswith("Total number of optimizer steps")
