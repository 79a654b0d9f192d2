from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from d9d_metrics import ConsoleTrackerConfig, JsonlTrackerConfig, TrackerConfig, build_trackers, read_metrics

TRACKERS: TypeAdapter[list[TrackerConfig]] = TypeAdapter(list[TrackerConfig])


def test_kind_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = TRACKERS.validate_python([{"kind": "jsonl", "file": "a.jsonl"}, {"kind": "console"}])
    assert configs == [JsonlTrackerConfig(file="a.jsonl"), ConsoleTrackerConfig()]
    build_trackers(configs, tmp_path).log(1, {"loss": 0.5})
    assert read_metrics(tmp_path / "a.jsonl")[0]["loss"] == 0.5
    assert "loss    0.500000" in capsys.readouterr().out


def test_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValidationError, match=r"tag 'csv' found using 'kind' does not match.*'jsonl', 'console'"):
        TRACKERS.validate_python([{"kind": "csv"}])


def test_refuses_an_unknown_field() -> None:
    with pytest.raises(ValidationError, match=r"jsonl\.path\n  Extra inputs are not permitted"):
        TRACKERS.validate_python([{"kind": "jsonl", "path": "a.jsonl"}])
