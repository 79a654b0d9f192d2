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
from d9d_metrics.trackers.values import Histogram, Image, Text, Tracked

_ID = "trackio_run_id"


@final
class TrackioTracker(Tracker):
    """Tracker that logs to a run of Trackio. Values are in the database when `log` returns.

    Equal values of a step that is logged again are stored once. Histograms and images are skipped. See `TRACKIO_DIR`.
    """

    def __init__(self, project: str, *, name: str) -> None:
        """Configure a new run. Raises `UserError` if the package trackio is missing."""
        require_package("trackio")
        self._project, self._name, self._id = project, name, secrets.token_hex(16)
        self._config: dict[str, JsonValue] | None = None

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

        kept: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(value, Histogram | Image):
                key = f"__{name}" if name in RESERVED_KEYS else name
                kept[key] = value.text if isinstance(value, Text) else float(value)
        if not kept:
            return
        # `trackio.log` writes later, and continues after an error; this call raises errors of the disk.
        digest = hashlib.sha256(json.dumps([self._id, step, kept]).encode()).hexdigest()
        trackio.SQLiteStorage.bulk_log(
            self._project, self._name, [kept], [step], config=self._config, log_ids=[digest], run_id=self._id
        )
        self._config = None

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
