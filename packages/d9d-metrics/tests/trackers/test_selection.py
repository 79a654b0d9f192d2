import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from d9d_dist import UserError
from d9d_metrics import (
    AimTracker,
    ConsoleTrackerConfig,
    JsonlTrackerConfig,
    MlflowTracker,
    MlflowTrackerConfig,
    PrometheusTracker,
    TensorBoardTracker,
    Tracker,
    TrackerConfig,
    TrackioTracker,
    TrackioTrackerConfig,
    WandbTracker,
    build_trackers,
    read_metrics,
)
from d9d_metrics.trackers import _extras
from d9d_metrics.trackers.selection import check_trackers

TRACKERS: TypeAdapter[list[TrackerConfig]] = TypeAdapter(list[TrackerConfig])


def test_kind_selects_the_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = TRACKERS.validate_python([{"kind": "jsonl", "file": "a.jsonl"}, {"kind": "console"}])
    assert configs == [JsonlTrackerConfig(file="a.jsonl"), ConsoleTrackerConfig()]
    tracker = build_trackers(configs, tmp_path)
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert read_metrics(tmp_path / "a.jsonl")[0]["loss"] == 0.5
    assert "loss    0.500000" in capsys.readouterr().out


def test_rejects_an_unknown_kind() -> None:
    with pytest.raises(
        ValidationError,
        match=r"tag 'paper' found using 'kind' does not match.*'jsonl', .*, 'prometheus'",
    ):
        TRACKERS.validate_python([{"kind": "paper"}])


def test_rejects_an_unknown_field() -> None:
    with pytest.raises(ValidationError, match=r"jsonl\.path\n  Extra inputs are not permitted"):
        TRACKERS.validate_python([{"kind": "jsonl", "path": "a.jsonl"}])


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("wandb", lambda folder: WandbTracker(folder, project="p")),
        ("aim", lambda folder: AimTracker(str(folder))),
        ("mlflow", lambda folder: MlflowTracker(f"sqlite:///{folder}/mlflow.db")),
        ("mlflow", lambda folder: MlflowTrackerConfig().build(folder)),
        ("trackio", lambda folder: TrackioTracker("p", name=folder.name)),
        ("trackio", lambda folder: TrackioTrackerConfig().build(folder)),
        ("tensorboard", TensorBoardTracker),
        ("prometheus", lambda folder: PrometheusTracker(run=folder.name, port=0)),
    ],
)
def test_a_missing_package_is_an_error_at_construction(
    package: str, build: Callable[[Path], Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_extras, "find_spec", lambda _module: None)
    with pytest.raises(UserError, match=rf"the {package} tracker needs .* Install it: .*'?{package}"):
        build(tmp_path)


def test_no_tracker_is_open_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = TRACKERS.validate_python([{"kind": "wandb", "project": "p"}, {"kind": "tensorboard"}])
    monkeypatch.setattr(_extras, "find_spec", lambda module: None if module == "tensorboard" else object())
    before = threading.active_count()
    for refuse in (lambda: check_trackers(configs), lambda: build_trackers(configs, tmp_path)):
        with pytest.raises(UserError, match=r"the tensorboard tracker needs .*pip install 'tensorboard>=2"):
            refuse()
    # The second tracker fails for another reason, after the first one has started its threads.
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "tensorboard").write_text("in the way")
    monkeypatch.setattr(_extras, "find_spec", lambda _module: object())
    with pytest.raises(OSError, match="tensorboard"):
        build_trackers(configs, tmp_path)
    assert threading.active_count() == before


@pytest.mark.parametrize("config", [{"kind": "jsonl"}, {"kind": "tensorboard"}, {"kind": "wandb", "project": "p"}])
def test_rejects_two_trackers_with_the_same_files(config: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"got two trackers of kind '{config['kind']}'.*expected one\. Remove one"):
        build_trackers(TRACKERS.validate_python([config, {"kind": "console"}, config]), tmp_path)
