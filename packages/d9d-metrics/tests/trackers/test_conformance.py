"""The same calls to every tracker, read back with the tool's own reader: what each of them keeps.

A run logs finite and non-finite values, a step twice, and an earlier step. Then another tracker resumes it after
step 3.
The lane `trackers` of `.ci/nightly` has MLflow with its server, and Trackio.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from wandb_records import records

from d9d_metrics import Histogram, Image, Text, read_metrics
from d9d_metrics.trackers._extras import ExtraTrackerConfig
from d9d_metrics.trackers.aim_repository import AimTrackerConfig
from d9d_metrics.trackers.jsonl import JsonlTrackerConfig
from d9d_metrics.trackers.mlflow_run import MlflowTracker, MlflowTrackerConfig
from d9d_metrics.trackers.tensorboard_events import TensorBoardTrackerConfig
from d9d_metrics.trackers.trackio_database import TrackioTracker, TrackioTrackerConfig
from d9d_metrics.trackers.weights_and_biases import WandbTrackerConfig

Points = list[tuple[int, float]]
NAN, INF = math.nan, math.inf
FIRST: Points = [(1, 1.0), (1, 1.5), (2, NAN), (3, INF), (4, -INF), (5, 5.0), (2, 20.0), (6, 6.0)]
SECOND: Points = [(4, 40.0), (5, 50.0)]
LARGEST = 1.7976931348623157e308


def _jsonl(run: Path, _: Mapping[str, Any]) -> Points:
    return [(int(line["step"]), line["loss"]) for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def _tensorboard(run: Path, _: Mapping[str, Any]) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {file.parent for file in run.rglob("events.out.tfevents.*")}
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def _wandb(run: Path, _: Mapping[str, Any]) -> Points:
    points = []
    for record in records(run):
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "loss" in values:
                points.append((record.history.step.num, float(values["loss"].strip('"'))))
    return points


def _aim(run: Path, state: Mapping[str, Any]) -> Points:
    import aim
    from aim.storage.context import Context

    time.sleep(0.6)  # Aim looks for new runs twice a second
    quiet: dict[str, Any] = {"system_tracking_interval": None, "log_system_params": False}
    opened = aim.Run(
        state["aim_run_hash"], repo=str(run.parent), force_resume=True, capture_terminal_logs=False, **quiet
    )
    metric: Any = opened.get_metric("loss", Context({}))
    steps, (values, *_) = metric.data.items_list()
    opened.close()
    return sorted(zip(map(int, steps), values, strict=True))


@contextmanager
def _mlflow_server(folder: Path) -> Generator[str]:
    """Start a server with a database; yield its address."""
    pytest.importorskip("flask", reason="needs mlflow's server")
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination",
        str(folder / "served"),
    ]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with subprocess.Popen([sys.executable, "-m", "mlflow", *words], env=environment, start_new_session=True) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)


KEPT: Points = [(1, 1.0), (1, 1.5), (2, NAN), (3, INF), (2, 20.0), (4, 40.0), (5, 50.0)]
"""Steps after 3 are discarded, and logged by the second process."""
TOOLS: dict[str, tuple[Any, Callable[[Path, Mapping[str, Any]], Points], Points]] = {
    "jsonl": (JsonlTrackerConfig(), _jsonl, KEPT),
    "tensorboard": (TensorBoardTrackerConfig(), _tensorboard, KEPT),
    # The last value of a step counts, an earlier step is dropped, and the second process has a file of its own.
    "wandb": (
        WandbTrackerConfig(project="test", mode="offline"),
        _wandb,
        [(1, 1.5), (2, NAN), (3, INF), (4, -INF), (5, 5.0), (6, 6.0), (4, 40.0), (5, 50.0)],
    ),
    # The last value of a step counts.
    "aim": (AimTrackerConfig(), _aim, [(1, 1.5), (2, 20.0), (3, INF), (4, 40.0), (5, 50.0), (6, 6.0)]),
}
ALL_VALUES: Points = [
    *((1, 1.0), (1, 1.5), (2, NAN), (3, LARGEST), (4, -LARGEST), (5, 5.0), (2, 20.0), (6, 6.0), (4, 40.0), (5, 50.0)),
]
"""MLflow keeps every value, and infinities as the largest number."""


def _log_and_resume(config: Any, run: Path) -> dict[str, Any]:
    """Log with two trackers, the second of which resumes the run; return its state."""
    first = config.build(run)
    first.resume(-1)
    first.log_config({"lr": 0.5, "mesh": {"dp": 2, "password": "canary"}})
    for step, value in FIRST:
        first.log(step, {"loss": value})
    first.close()
    state = first.state_dict()
    second = config.build(run)
    second.resume(3, state)
    for step, value in SECOND:
        second.log(step, {"loss": value})
    second.close()
    assert second.state_dict() == state
    return second.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_keeps_what_the_table_says(tool: str, tmp_path: Path) -> None:
    config, read, expected = TOOLS[tool]
    state = _log_and_resume(config, tmp_path / "run")
    assert repr(read(tmp_path / "run", state)) == repr(expected)


@pytest.mark.full
@pytest.mark.parametrize("store", ["database", "files", "server"])
def test_mlflow_keeps_every_value(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client raises without it
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    places = {"database": None, "files": (tmp_path / "store").as_uri()}
    with _mlflow_server(tmp_path) if store == "server" else nullcontext(places.get(store)) as uri:
        client = mlflow.MlflowClient(uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
        client.search_experiments()  # repeated until the server answers
        state = _log_and_resume(MlflowTrackerConfig(uri=uri), tmp_path / "run")
        history = client.get_metric_history(state["mlflow_run_id"], "loss")
        found = [(point.step, point.value) for point in history]
        expected = ALL_VALUES if store != "files" else [*FIRST, *SECOND]
        assert repr(found) == repr(expected)
        stored = client.get_run(state["mlflow_run_id"])
        assert stored.data.params == {"lr": "0.5", "mesh.dp": "2", "mesh.password": "<redacted>"}
        assert (stored.info.run_name, stored.info.status) == ("run", "FINISHED")
        assert client.get_experiment(stored.info.experiment_id).name == "d9d"

        tracker = MlflowTracker(uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
        tracker.resume(6, state)
        tracker.log_config({"lr": 0.25, "new": [1, 2]})
        tracker.log(7, {"a/b[0]": 1.0, "words": Text("hello"), "picture": Image(b"png"), "h": Histogram(0, 1, (1.0,))})
        assert client.get_run(state["mlflow_run_id"]).info.status == "RUNNING"
        tracker.close()
        stored = client.get_run(state["mlflow_run_id"])
        assert (stored.data.params["lr"], stored.data.params["new"]) == ("0.5", "[1, 2]")  # MLflow changes none
        assert stored.data.metrics["a/b_0_"] == 1.0
        files = {
            name: client.download_artifacts(state["mlflow_run_id"], name) for name in ("config.json", "words/7.txt")
        }
        assert {name: Path(path).read_text() for name, path in files.items()} == {
            "config.json": '{\n  "lr": 0.25,\n  "new": [\n    1,\n    2\n  ]\n}',
            "words/7.txt": "hello",
        }
        assert Path(client.download_artifacts(state["mlflow_run_id"], "picture/7.png")).read_bytes() == b"png"


@pytest.mark.full
def test_trackio_keeps_every_value_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    trackio = pytest.importorskip("trackio", reason="needs trackio, which the lane trackers has")
    state = _log_and_resume(TrackioTrackerConfig(), tmp_path / "run")
    (run,) = trackio.Api().runs("d9d")
    assert (run.name, run.id) == ("run", state["trackio_run_id"])
    read = trackio.SQLiteStorage.get_logs
    assert repr([(point["step"], point["loss"]) for point in read("d9d", "run")]) == repr([*FIRST, *SECOND])
    assert {name: run.config[name] for name in ("lr", "mesh")} == {
        "lr": 0.5,
        "mesh": {"dp": 2, "password": "<redacted>"},
    }

    # A start after a crash delivers some values again.
    tracker = TrackioTracker("d9d", name="run")
    tracker.resume(6, state)
    tracker.log_config({"lr": 0.25})
    tracker.log(5, {"loss": 50.0})
    tracker.log(7, {"time": 1.0, "words": Text("hello"), "picture": Image(b"png"), "h": Histogram(0, 1, (1.0,))})
    tracker.log(8, {"picture": Image(b"png")})
    *earlier, last = read("d9d", "run")
    assert len(earlier) == len([*FIRST, *SECOND])
    assert {name: last[name] for name in last if name != "timestamp"} == {"step": 7, "__time": 1.0, "words": "hello"}
    (run,) = trackio.Api().runs("d9d")
    assert run.config["lr"] == 0.25
    monkeypatch.setattr(trackio.SQLiteStorage, "init_db", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        tracker.log(9, {"loss": 1.0})


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_metrics.trackers._extras.find_spec", lambda _module: None)
    config: ExtraTrackerConfig = MlflowTrackerConfig()
    with pytest.raises(Exception, match=r"the mlflow tracker needs the package mlflow, .*mlflow-skinny>=3"):
        config.build(tmp_path)
