"""MLflow tracker, for a database file, a server, or another address that MLflow supports."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field, JsonValue

from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Histogram, Html, Image, Text, Tracked

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ID = "mlflow_run_id"
_INVALID = re.compile(r"[^\w./ -]")
_MOST_METRICS, _LONGEST_PARAM = 1000, 6000  # metrics in one request, characters


@final
class MlflowTracker(Tracker):
    """Tracker that logs to an MLflow run, which is opened when first needed. MLflow writes values when they are logged.

    MLflow keeps every value: a step that is logged again has both. Its parameters cannot be changed: a resumed run
    keeps the first ones, and the artifact `config.json` has the latest configuration. Text, images and
    pages are artifacts, such as `NAME/STEP.txt`; histograms are skipped. In names, MLflow does not accept all
    characters: others become `_`. MLflow measures the host if the package psutil is installed.
    """

    def __init__(
        self, uri: str, *, experiment: str = "d9d", name: str | None = None, artifacts: str | None = None
    ) -> None:
        """Configure a new run; it is not opened yet.

        `uri` is MLflow's tracking URI, such as `sqlite:////path/mlflow.db` or `http://host:5000`. A new
        experiment stores its artifacts at the URI `artifacts`. Raises `UserError` if the package mlflow is
        missing.
        """
        require_package("mlflow")
        self._uri, self._experiment, self._name, self._artifacts = uri, experiment, name, artifacts
        self._id: str | None = None
        self._client: MlflowClient | None = None
        self._monitor: Any = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Open the run of the state's id, or a new run if the state has none."""
        if _ID in state:
            self._id = str(state[_ID])
        self._open()

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Log the configuration as `config.json` and as parameters with dotted names, with secrets redacted."""
        client, run = self._open()
        redacted = redact_secrets(config)
        known = client.get_run(run).data.params
        for name, value in _flatten(redacted):
            if name not in known:
                client.log_param(run, name, str(value)[:_LONGEST_PARAM])
        client.log_dict(run, redacted, "config.json")

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the values of a step."""
        from mlflow.entities import Metric

        client, run = self._open()
        now, metrics = int(time.time() * 1000), []
        for name, value in _flatten(values):
            match value:
                case Text():
                    client.log_text(run, value.text, f"{name}/{step}.txt")
                case Image():
                    with tempfile.TemporaryDirectory() as folder:
                        (path := Path(folder, f"{step}.png")).write_bytes(value.png)
                        client.log_artifact(run, str(path), name)
                case Html():
                    client.log_text(run, value.html, f"{name}/{step}.html")
                case Histogram():
                    pass
                case number:
                    metrics.append(Metric(name, float(number), now, step))
        for start in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(run, metrics=metrics[start : start + _MOST_METRICS])

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run's id; empty if the run was not opened yet."""
        return {} if self._id is None else {_ID: self._id}

    def close(self) -> None:
        """Mark the run as finished. A run whose job was killed is shown as running until it is resumed."""
        if self._client is not None and self._id is not None:
            if self._monitor is not None:
                self._monitor.finish()
            self._client.set_terminated(self._id)
            self._client = None

    def _open(self) -> "tuple[MlflowClient, str]":
        """Return a client and the run's id; create the run, or mark it as running, at the first call."""
        if self._client is None or self._id is None:
            from mlflow import MlflowClient

            client = MlflowClient(self._uri)
            if self._id is None:
                found = client.get_experiment_by_name(self._experiment)
                new = None if found else client.create_experiment(self._experiment, artifact_location=self._artifacts)
                self._id = str(client.create_run(new or found.experiment_id, run_name=self._name).info.run_id)
            else:
                client.update_run(self._id, status="RUNNING")
            self._client = client
            if find_spec("psutil"):
                from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

                self._monitor = SystemMetricsMonitor(self._id, resume_logging=True, tracking_uri=self._uri)
                self._monitor.start()
        return self._client, self._id


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values with dotted names of valid characters."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield _INVALID.sub("_", f"{prefix}{name}"), value


@final
class MlflowTrackerConfig(ExtraTrackerConfig):
    """Configuration of MLflow; needs the extra `mlflow`.

    Attributes:
        uri: MLflow's tracking URI, such as `http://host:5000`. By default, the parent folder of the run folders has one
            database for all runs, `mlflow.db`, and their artifacts in `mlartifacts`.
        name: Display name of the run; the name of the run folder if null.
    """

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    experiment: str = Field(default="d9d", min_length=1)
    name: str | None = None

    def _opener(self, run_dir: Path) -> Callable[[], MlflowTracker]:
        parent = run_dir.resolve().parent
        uri, artifacts = self.uri, None
        if uri is None:
            uri, artifacts = f"sqlite:///{parent / 'mlflow.db'}", (parent / "mlartifacts").as_uri()
        name = self.name or run_dir.resolve().name
        return lambda: MlflowTracker(uri, experiment=self.experiment, name=name, artifacts=artifacts)
