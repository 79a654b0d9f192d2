"""Writes real offline runs, and reads them from W&B's own file."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from wandb_records import records

from d9d_dist import UserError
from d9d_metrics import Histogram, Image, Text, WandbTracker, WandbTrackerConfig
from d9d_metrics.trackers import _extras


def finished(folder: Path, *, num_runs: int = 1) -> Path:
    """Return the folder once W&B's own process, which is asynchronous, has finished this number of runs."""
    for _ in range(3000):
        if sum(record.WhichOneof("record_type") == "exit" for record in records(folder)) == num_runs:
            return folder
        time.sleep(0.1)
    raise AssertionError("W&B did not finish its runs in five minutes")


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged values."""
    rows = [record.history for record in records(folder) if record.WhichOneof("record_type") == "history"]
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def runs(folder: Path) -> list[str]:
    return [record.run.run_id for record in records(folder) if record.WhichOneof("record_type") == "run"]


def config(folder: Path) -> dict[str, Any]:
    updates = [record.config.update for record in records(folder) if record.WhichOneof("record_type") == "config"]
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for update in updates for item in update}


def a_picture() -> Image:
    from matplotlib.figure import Figure

    return Image.of(Figure(figsize=(1, 1), dpi=20))


@pytest.mark.slow
def test_values_can_be_read_and_a_run_is_resumed(tmp_path: Path) -> None:
    first = WandbTracker(tmp_path, project="test", mode="offline")
    first.log_config({"lr": 0.5, "mesh": {"dp": 2, "password": "canary"}})
    first.log(3, {"loss": 1.5, "h": Histogram(0.0, 4.0, (1.0, 3.0)), "t": Text("hello"), "p": a_picture()})
    first.log(3, {"rate": 2.0})
    first.log(4, {"loss": float("inf")})
    first.close()
    state = first.state_dict()
    rows = [row for row in history(finished(tmp_path)) if row["_step"] in (3, 4)]
    assert [(row["_step"], row["loss"]) for row in rows] == [(3, 1.5), (4, float("inf"))]
    assert (rows[0]["rate"], rows[0]["t"]) == (2.0, "hello")
    assert rows[0]["p._type"] == "image-file"
    (stored,) = tmp_path.glob(f"wandb/offline-run-*/files/{rows[0]['p.path']}")
    assert stored.read_bytes() == a_picture().png
    assert (rows[0]["h.values"], rows[0]["h.bins"]) == ([1.0, 3.0], [0.0, 2.0, 4.0])
    assert config(tmp_path)["mesh"] == {"dp": 2, "password": "<redacted>"}
    assert b"canary" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    second = WandbTracker(tmp_path, project="test", mode="offline")
    assert second.state_dict() != state
    second.resume(4, state)
    second.log(5, {"loss": 0.5})
    second.close()
    assert set(runs(finished(tmp_path, num_runs=2))) == {state["wandb_run_id"]}
    assert [row["_step"] for row in history(tmp_path) if "loss" in row] == [3, 4, 5]


@pytest.mark.full
def test_config_builds_a_tracker_with_a_spool(tmp_path: Path) -> None:
    chosen = WandbTrackerConfig(project="test", mode="offline", tags=("a",), group="g")
    tracker = chosen.build(tmp_path)
    tracker.resume(0)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert [row["loss"] for row in history(finished(tmp_path)) if "loss" in row] == [1.0]
    assert runs(tmp_path)[0] == tracker.state_dict()["wandb_run_id"]
    assert chosen.build(tmp_path).state_dict() == tracker.state_dict(), "the next start would not find the run"


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extras, "find_spec", lambda _module: None)
    with pytest.raises(UserError, match=r"the wandb tracker needs .* pip install .*'wandb>=0"):
        WandbTrackerConfig(project="test").build(tmp_path)
