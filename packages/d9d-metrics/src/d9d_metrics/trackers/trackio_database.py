"""Trackio tracker, for the database on this host that `trackio show` displays."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from pydantic import Field, JsonValue

from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Histogram, Html, Image, Text, Tracked

_ID = "trackio_run_id"


@final
class TrackioTracker(Tracker):
    """Tracker that logs to a run of Trackio. Values are in the database when `log` returns.

    Equal values of a step that is logged again are stored once. See `TRACKIO_DIR`. Trackio measures GPUs, and the host
    if the package psutil is installed.
    """

    def __init__(self, project: str, *, name: str) -> None:
        """Configure a new run. Raises `UserError` if the package trackio is missing."""
        require_package("trackio")
        self._project, self._name, self._id = project, name, secrets.token_hex(16)
        self._config: dict[str, JsonValue] | None = None
        self._monitors: list[Any] | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Use the run id of the state, if it has one."""
        self._id = str(state.get(_ID, self._id))

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Store the configuration with the next values, with secrets redacted."""
        self._config = redact_secrets(config) | {"_Username": None, "_Created": datetime.now(UTC).isoformat()}

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the values of a step; text is logged as a string."""
        import trackio
        from trackio.utils import RESERVED_KEYS

        kept = {
            f"__{name}" if name in RESERVED_KEYS else name: self._converted(step, name, value)
            for name, value in values.items()
        }
        # `trackio.log` writes later, and continues after an error; this call raises errors of the disk.
        digest = hashlib.sha256(json.dumps([self._id, step, kept]).encode()).hexdigest()
        trackio.SQLiteStorage.bulk_log(
            self._project, self._name, [kept], [step], config=self._config, log_ids=[digest], run_id=self._id
        )
        self._config = None
        if self._monitors is None:
            self._start_monitors()

    def log_system(self, metrics: dict[str, float]) -> None:
        """Log measurements of the host or its GPUs, which Trackio shows over time."""
        import trackio

        trackio.SQLiteStorage.bulk_log_system(self._project, self._name, [metrics], run_id=self._id)

    def close(self) -> None:
        """Stop to measure the host."""
        for monitor in self._monitors or ():
            monitor.stop()

    def _start_monitors(self) -> None:
        from trackio.cpu import CpuMonitor, cpu_available
        from trackio.gpu import GpuMonitor, gpu_available

        found = ((CpuMonitor, cpu_available()), (GpuMonitor, gpu_available()))
        self._monitors = [monitor(self) for monitor, is_available in found if is_available]
        for monitor in self._monitors:
            monitor.start()

    def _converted(self, step: int, name: str, value: Tracked) -> Any:
        match value:
            case Histogram():
                return {"_type": "trackio.histogram", "bins": list(value.edges), "values": list(value.counts)}
            case Text():
                return value.text
            case Image():
                return self._write_file(step, name, "image", "png", value.png)
            case Html():
                return self._write_file(step, name, "html", "html", value.html.encode())
        return float(value)

    def _write_file(self, step: int, name: str, kind: str, suffix: str, content: bytes) -> dict[str, Any]:
        """Write a file to Trackio's folder of the step, and return the reference to it that Trackio stores."""
        from trackio.media.utils import get_project_media_path
        from trackio.utils import MEDIA_DIR

        digest = hashlib.sha256(name.encode() + content).hexdigest()[:32]
        file = get_project_media_path(self._project, self._name, step) / f"{digest}.{suffix}"
        file.write_bytes(content)
        return {"_type": f"trackio.{kind}", "file_path": str(file.relative_to(MEDIA_DIR)), "caption": None}

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the run's id."""
        return {_ID: self._id}


@final
class TrackioTrackerConfig(ExtraTrackerConfig):
    """Configuration of Trackio; needs the package trackio.

    Attributes:
        name: Display name of the run; the name of the run folder if null.
    """

    kind: Literal["trackio"] = "trackio"
    project: str = Field(default="d9d", min_length=1)
    name: str | None = None

    def _opener(self, run_dir: Path) -> Callable[[], TrackioTracker]:
        name = self.name or run_dir.resolve().name
        return lambda: TrackioTracker(self.project, name=name)
