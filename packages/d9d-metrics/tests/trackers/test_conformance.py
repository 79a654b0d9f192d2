"""The same calls to every tracker, read back with the tool's own reader: what each of them keeps.

A run logs finite and non-finite values, a step twice, and an earlier step. Then another tracker resumes it after
step 3, and logs text, an image, a histogram and a page. `docs/metrics.md` has a row for each tool, which a test makes
of what was read.
The lane `trackers` of `.ci/nightly` has MLflow with its server, and Trackio.
"""

import importlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
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
from d9d_metrics.trackers.values import Html, from_json
from d9d_metrics.trackers.weights_and_biases import WandbTrackerConfig

Points = list[tuple[int, float]]
NAN, INF = math.nan, math.inf
FIRST: Points = [(0, NAN), (1, 1.0), (1, 1.5), (2, 2.0), (3, INF), (4, -INF), (5, 5.0), (2, 20.0), (6, 6.0)]
SECOND: Points = [(4, 40.0), (5, 50.0)]
LARGEST = 1.7976931348623157e308
PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
MEDIA = {"text": Text("hello"), "image": Image(PNG), "histogram": Histogram(0, 1, (1.0, 2.0)), "page": Html("<p>a</p>")}
PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


class Read(NamedTuple):
    """What a tool's reader returns: values of the loss, the media, and whether the host was measured."""

    points: Points
    media: Mapping[str, object]
    measured: bool = False


def _jsonl(run: Path, _: Mapping[str, Any]) -> Read:
    points = [(int(line["step"]), line["loss"]) for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    media = {"text": from_json(last["text"]), "histogram": from_json(last["histogram"])}
    return Read(points, media | {"image": Image((run / last["image"]["picture"]).read_bytes())})


def _tensorboard(run: Path, _: Mapping[str, Any]) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {file.parent for file in run.rglob("events.out.tfevents.*")}
    read = EventAccumulator(str(folder)).Reload()
    (text,), (image,), (histogram,) = (
        read.Tensors("text/text_summary"),
        read.Images("image"),
        read.Histograms("histogram"),
    )
    values = histogram.histogram_value
    media = {
        "text": Text(text.tensor_proto.string_val[0].decode()),
        "image": Image(image.encoded_image_string),
        "histogram": Histogram(values.min, values.max, tuple(values.bucket)),
    }
    return Read([(event.step, event.value) for event in read.Scalars("loss")], media)


def _wandb(run: Path, _: Mapping[str, Any]) -> Read:
    import wandb

    wandb.teardown()  # ends W&B's own process, which may still write
    points, media, measured = [], {}, False
    for record in records(run):
        measured |= record.HasField("stats")
        if not record.HasField("history"):
            continue
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss" in values:
            points.append((record.history.step.num, float(values["loss"])))
        if "text" in values:
            (image,), (page,) = (run.rglob(f"files/{values[name + '.path']}") for name in ("image", "page"))
            counts, edges = values["histogram.values"], values["histogram.bins"]
            media = {
                "text": Text(values["text"]),
                "image": Image(image.read_bytes()),
                "histogram": Histogram(edges[0], edges[-1], tuple(counts)),
                "page": Html(page.read_text()),
            }
    return Read(points, media, measured)


def _aim(run: Path, state: Mapping[str, Any]) -> Read:
    import aim
    from aim.storage.context import Context

    time.sleep(0.6)  # Aim looks for new runs twice a second
    quiet: dict[str, Any] = {"system_tracking_interval": None, "log_system_params": False}
    opened: Any = aim.Run(
        state["aim_run_hash"], repo=str(run.parent), force_resume=True, capture_terminal_logs=False, **quiet
    )
    context = Context({})
    steps, (values, *_) = opened.get_metric("loss", context).data.items_list()
    text, image, histogram = (
        sequence.values.last_value()
        for sequence in (
            opened.get_text_sequence("text", context),
            opened.get_image_sequence("image", context),
            opened.get_distribution_sequence("histogram", context),
        )
    )
    image.to_pil_image().save(png := io.BytesIO(), format="png")
    page = Path(opened.artifacts["page/6.html"].uri.removeprefix("file://"))
    media = {
        "text": Text(text.data),
        "image": Image(png.getvalue()),
        "histogram": Histogram(*histogram.range, tuple(histogram.weights.tolist())),
        "page": Html(page.read_text()),
    }
    measured = opened.get_metric("__system__cpu", context) is not None
    opened.close()
    return Read(sorted(zip(map(int, steps), values, strict=True)), media, measured)


def _row(tool: str, read: Read) -> str:
    """Return the row of a tool in the table of the docs."""
    of_step = {step: [value for at, value in read.points if at == step] for step, _ in FIRST}
    twice = {2: "both values", 1: "last value"}[len(of_step[1])]
    earlier = {(2.0, 20.0): "both values", (20.0,): "replaces the value", (2.0,): "dropped"}[tuple(of_step[2])]
    again = "both values" if INF in map(abs, of_step[4]) or LARGEST in map(abs, of_step[4]) else "new value"
    (infinity,) = of_step[3]
    assert repr(of_step[0]) == "[nan]"
    assert {**MEDIA, **read.media} == MEDIA
    cells = (
        twice,
        earlier,
        again,
        "kept" if infinity == INF else f"±{infinity:.1e}",
        ", ".join(name for name in MEDIA if name in read.media),
    )
    return "| " + " | ".join((f"`{tool}`", *cells, "yes" if read.measured else "no")) + " |"


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


TOOLS: dict[str, tuple[Any, Callable[[Path, Mapping[str, Any]], Read]]] = {
    "jsonl": (JsonlTrackerConfig(), _jsonl),
    "tensorboard": (TensorBoardTrackerConfig(), _tensorboard),
    "wandb": (WandbTrackerConfig(project="test", mode="offline"), _wandb),
    "aim": (AimTrackerConfig(), _aim),
}


def _log_and_resume(config: Any, run: Path, *, measured: Callable[[str], bool] = lambda _: True) -> dict[str, Any]:
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
    second.log(6, MEDIA)
    end = time.monotonic() + 120
    while not measured(str([*state.values(), ""][0])) and time.monotonic() < end:
        time.sleep(0.1)
    second.close()
    assert second.state_dict() == state
    return second.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_keeps_what_its_row_of_the_docs_says(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.1")
    config, read = TOOLS[tool]
    state = _log_and_resume(config, tmp_path / "run")
    assert _row(tool, read(tmp_path / "run", state)) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.full
@pytest.mark.parametrize("store", ["database", "files", "server"])
def test_mlflow_keeps_every_value(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client raises without it
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.chdir(tmp_path)
    places = {"database": None, "files": (tmp_path / "store").as_uri()}
    with _mlflow_server(tmp_path) if store == "server" else nullcontext(places.get(store)) as uri:
        client = mlflow.MlflowClient(uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
        client.search_experiments()  # repeated until the server answers

        def measured(run: str) -> bool:
            return "system/cpu_utilization_percentage" in client.get_run(run).data.metrics

        state = _log_and_resume(MlflowTrackerConfig(uri=uri), tmp_path / "run", measured=measured)
        run = str(state["mlflow_run_id"])
        points = [(point.step, point.value) for point in client.get_metric_history(run, "loss")]
        names = {"text": "text/6.txt", "image": "image/6.png", "page": "page/6.html"}
        files = {kind: Path(client.download_artifacts(run, name)).read_bytes() for kind, name in names.items()}
        media = {
            "text": Text(files["text"].decode()),
            "image": Image(files["image"]),
            "page": Html(files["page"].decode()),
        }
        if store == "files":
            assert repr(points) == repr([*FIRST, *SECOND])
        else:
            row = _row("mlflow", Read(points, media, measured(run)))
            assert row in PAGE.read_text(encoding="utf-8").splitlines()
        stored = client.get_run(run)
        assert stored.data.params == {"lr": "0.5", "mesh.dp": "2", "mesh.password": "<redacted>"}
        assert (stored.info.run_name, stored.info.status) == ("run", "FINISHED")
        assert client.get_experiment(stored.info.experiment_id).name == "d9d"

        tracker = MlflowTracker(uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
        tracker.resume(6, state)
        tracker.log_config({"lr": 0.25, "new": [1, 2]})
        tracker.log(7, {"a/b[0]": 1.0})
        assert client.get_run(run).info.status == "RUNNING"
        tracker.close()
        stored = client.get_run(run)
        assert (stored.data.params["lr"], stored.data.params["new"]) == ("0.5", "[1, 2]")  # MLflow changes none
        assert stored.data.metrics["a/b_0_"] == 1.0
        config = Path(client.download_artifacts(run, "config.json")).read_text()
        assert config == '{\n  "lr": 0.25,\n  "new": [\n    1,\n    2\n  ]\n}'


@pytest.mark.full
def test_trackio_keeps_every_value_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    trackio = pytest.importorskip("trackio", reason="needs trackio, which the lane trackers has")
    monkeypatch.setattr(importlib.import_module("trackio.cpu").CpuMonitor.__init__, "__defaults__", (0.1,))
    storage = trackio.SQLiteStorage

    def measured(_: str) -> bool:
        return any("cpu/utilization" in sample for sample in storage.get_system_logs("d9d", "run"))

    state = _log_and_resume(TrackioTrackerConfig(), tmp_path / "run", measured=measured)
    (run,) = trackio.Api().runs("d9d")
    assert (run.name, run.id) == ("run", state["trackio_run_id"])
    *points, last = storage.get_logs("d9d", "run")
    files = {name: tmp_path / "trackio" / "media" / last[name]["file_path"] for name in ("image", "page")}
    media = {
        "text": Text(last["text"]),
        "image": Image(files["image"].read_bytes()),
        "histogram": Histogram(
            last["histogram"]["bins"][0], last["histogram"]["bins"][-1], tuple(last["histogram"]["values"])
        ),
        "page": Html(files["page"].read_text()),
    }
    row = _row("trackio", Read([(point["step"], point["loss"]) for point in points], media, measured("")))
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
    assert {name: run.config[name] for name in ("lr", "mesh")} == {
        "lr": 0.5,
        "mesh": {"dp": 2, "password": "<redacted>"},
    }

    # A start after a crash delivers some values again.
    tracker = TrackioTracker("d9d", name="run")
    tracker.resume(6, state)
    tracker.log_config({"lr": 0.25})
    tracker.log(5, {"loss": 50.0})
    tracker.log(6, MEDIA)
    tracker.log(7, {"time": 1.0})
    *earlier, last = storage.get_logs("d9d", "run")
    assert len(earlier) == len([*FIRST, *SECOND, MEDIA])
    assert {name: last[name] for name in last if name != "timestamp"} == {"step": 7, "__time": 1.0}
    (run,) = trackio.Api().runs("d9d")
    assert run.config["lr"] == 0.25
    monkeypatch.setattr(storage, "init_db", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        tracker.log(9, {"loss": 1.0})
    tracker.close()


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_metrics.trackers._extras.find_spec", lambda _module: None)
    config: ExtraTrackerConfig = MlflowTrackerConfig()
    with pytest.raises(Exception, match=r"the mlflow tracker needs the package mlflow, .*mlflow-skinny>=3"):
        config.build(tmp_path)
