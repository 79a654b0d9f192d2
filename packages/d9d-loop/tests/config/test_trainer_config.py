import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from d9d_dist import UserError
from d9d_loop import Section, TrainerConfig, read_config_file, validate_config
from d9d_metrics import ConsoleTrackerConfig, JsonlTrackerConfig


class Text(Section):
    folder: Path
    length: int = 8


class MyConfig(TrainerConfig):
    text: Text


JOB = {"steps": 3, "batch": {"global_size": 8}, "text": {"folder": "here"}}


def test_only_fields_without_a_sensible_default_are_required() -> None:
    config = validate_config(TrainerConfig, {"steps": 3, "batch": {"global_size": 8}})
    assert config.run.dir == Path("runs/run")
    assert config.trackers == (JsonlTrackerConfig(),)


def test_configurations_are_frozen() -> None:
    config = validate_config(MyConfig, JOB)
    with pytest.raises(ValidationError, match="frozen"):
        config.text.length = 3  # ty: ignore[invalid-assignment]  (what is tested)


def test_a_job_may_add_sections() -> None:
    config = MyConfig.from_cli(None, ["--steps=3", "--batch.global_size=8", "--text.folder=here", "--text.length", "9"])
    assert (type(config), config.text) == (MyConfig, Text(folder=Path("here"), length=9))
    with pytest.raises(UserError, match=r"^text\.lenth is not a configuration key; did you mean text\.length\?$"):
        MyConfig.from_cli(None, ["--steps=3", "--batch.global_size=8", "--text.folder=x", "--text.lenth=9"])


def test_help_lists_own_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        MyConfig.from_cli(None, ["--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("[text]")
    assert lines[start + 1 : start + 3] == ["folder Path required", "length int = 8"]


def test_a_resolved_configuration_can_be_loaded(tmp_path: Path) -> None:
    values = {
        **JOB,
        "mesh": {"data_parallel_shard": -1},
        "trackers": [{"kind": "jsonl", "file": "m"}, {"kind": "console"}],
        "optimizer": {"betas": [0.5, 0.75], "eps": 1e-30},
        "gradients": {"max_norm": 0.1},
        "initial_weights": "weights",
    }
    config = validate_config(MyConfig, values)
    assert config.trackers[1] == ConsoleTrackerConfig()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert MyConfig.from_cli(file, []) == config
    assert validate_config(MyConfig, read_config_file(file)) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("seed", -1),
        ("batch", {"global_size": 8, "microbatch_size": 0}),
        ("data", {"num_workers": -1}),
        ("gradients", {"max_norm": 0}),
        ("checkpoint", {"every": 0}),
        ("checkpoint", {"keep_last": 0}),
        ("evaluation", {"num_samples": 0}),
        ("logging", {"every": 0}),
        ("run", {"name": ""}),
        ("optimizer", {"learning_rate": 0}),
        ("optimizer", {"weight_decay": -1}),
        ("lr_schedule", {"final_fraction": 2}),
        ("lr_schedule", {"warmup_steps": -1}),
    ],
)
def test_refuses_invalid_values(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^{key}[a-z_.]* = .*; .*\. Change it in the configuration file"):
        validate_config(MyConfig, {**JOB, key: value})
