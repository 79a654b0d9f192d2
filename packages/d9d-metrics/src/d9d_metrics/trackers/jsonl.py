"""JSON Lines tracker: one object per line of a file."""

import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_dist import UserError
from d9d_dist.durable_files import sync
from d9d_metrics.trackers._files import make_folder, open_complete_lines, replace_file
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Html, Image, Tracked, to_json

_LOGGER = logging.getLogger("d9d.metrics")
_UNSAFE_IN_FILE_NAME = re.compile(r"[^\w.-]")
RESERVED_NAMES = frozenset({"step", "time", "config"})


@final
class JsonlTracker(Tracker):
    """Tracker that appends lines to a JSON Lines file.

    `log` writes `{"step": 10, "time": 1767225600.0, "loss": 2.5}`, with the time in seconds since 1970. `log_config`
    writes `{"time": 1767225600.0, "config": {...}}`.

    NaN and infinities become the strings `"nan"`, `"inf"` and `"-inf"`, which `read_metrics`, Python's `float` and
    pandas' `to_numeric` parse. A histogram becomes `{"histogram": {...}}`, and text `{"text": ...}`. An image is saved
    as a PNG file in a folder beside this file, and its path is logged as `{"picture": ...}`.

    Each line is one unbuffered write, so logged lines are kept if the process is killed.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the file for appending; create its folder if needed, and drop an incomplete last line."""
        self._path = path
        self._clock = clock
        self._config: JsonValue = None
        self._kept: list[tuple[int, set[str]]] = []
        make_folder(path.parent)
        self._file = _open(path)
        sync(path.parent)

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Move the lines of steps after `step` to another file, such as `metrics-after-step-20.jsonl`.

        Lines of `step` that the interrupted run logged after its checkpoint stay: the next `log` of the same names for
        this step is skipped.

        If a line is damaged, the whole file is also copied to `metrics-damaged-1.jsonl`, and a warning names it.
        """
        lines = list(_parsed(self._path))
        if None in (record for _, record in lines):
            names = (
                self._path.with_name(f"{self._path.stem}-damaged-{number}{self._path.suffix}") for number in count(1)
            )
            aside = next(path for path in names if not path.exists())
            replace_file(aside, b"".join(line for line, _ in lines))
            _LOGGER.warning("%s has damaged lines, which are dropped; the whole file is kept as %s", self._path, aside)
        records = [(line, record) for line, record in lines if record is not None]
        kept = [line for line, record in records if record.get("step", step) <= step]
        later = [line for line, record in records if record.get("step", step) > step]
        aside = self._path.with_name(f"{self._path.stem}-after-step-{max(step, 0)}{self._path.suffix}")
        # A job that fails repeatedly before its next checkpoint repeats these steps: one copy is enough.
        if later and not (aside.exists() and aside.stat().st_size > sum(map(len, later))):
            replace_file(aside, b"".join(later))
        at_step = [record for _, record in records if record.get("step") == step]
        self._kept = [(step, record.keys() - RESERVED_NAMES) for record in at_step]
        self._config = next((record["config"] for _, record in reversed(records) if "config" in record), None)
        self._file.close()
        replace_file(self._path, b"".join(kept))
        self._file = _open(self._path)

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Append a line with the configuration, with secrets redacted, unless it is that of the last start."""
        redacted = redact_secrets(config)
        if redacted != self._config:
            self._append({"time": self._clock(), "config": redacted})

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Append a line with the values of a step, unless `resume` has kept a line of the same step and names.

        Pages are skipped.

        Raises:
            UserError: If a value has a reserved name: `step`, `time` or `config`.
        """
        if taken := RESERVED_NAMES & values.keys():
            raise UserError(
                f"got values named {sorted(taken)}; expected names other than {sorted(RESERVED_NAMES)}, which "
                f"{self._path} uses itself. Rename them."
            )
        written = {name: value for name, value in values.items() if not isinstance(value, Html)}
        if values and not written:
            return
        if (logged := (step, set(written))) in self._kept:
            self._kept.remove(logged)
            return
        lines = {name: self._to_json(step, name, value) for name, value in written.items()}
        self._append({"step": step, "time": self._clock(), **lines})

    def flush(self) -> None:
        """Fsync the file, so that its lines survive a power loss."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Fsync and close the file."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def _to_json(self, step: int, name: str, value: Tracked) -> JsonValue:
        """Return the JSON form of a value; save an image to its file first."""
        if not isinstance(value, Image):
            return to_json(value)
        file = self._path.with_name(f"{self._path.stem}-pictures") / f"{_UNSAFE_IN_FILE_NAME.sub('_', name)}-{step}.png"
        make_folder(file.parent)
        replace_file(file, value.png)
        return {"picture": f"{file.parent.name}/{file.name}"}

    def _append(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            # Close the file, so that nothing is appended to the incomplete line; opening it again drops that line.
            self._file.close()
            raise OSError(errno.ENOSPC, "only a part of a line was written; the disk may be full", str(self._path))


@final
class JsonlTrackerConfig(BaseModel):
    """Configuration of a JSON Lines file in the run folder.

    Attributes:
        file: Name of the file, relative to the run folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["jsonl"] = "jsonl"
    file: str = "metrics.jsonl"

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Create the tracker for the file in the run folder."""
        path = run_dir / self.file
        return BackgroundTracker(lambda: JsonlTracker(path), name=f"{self.kind} ({path})", start_seconds=30.0)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Read the numbers that a `JsonlTracker` logged: one mapping per call of `log`, with `step` and `time`.

    Configurations, histograms, text, images and an incomplete last line are skipped.

    Raises:
        UserError: If a line is not a JSON object.
    """
    records: list[dict[str, float]] = []
    for number, (line, record) in enumerate(_parsed(Path(path)), start=1):
        if record is None:
            raise UserError(
                f"got {line[:-1][:40]!r} in line {number} of {path}; expected a JSON object. "
                "Delete the line or the file."
            )
        if "step" in record:
            numbers = {name: float(value) for name, value in record.items() if not isinstance(value, dict)}
            records.append(numbers | {"step": record["step"]})
    return records


def _parsed(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the complete lines of a file, each with its JSON object; `None` for a damaged line."""
    *lines, _incomplete = path.read_bytes().split(b"\n")  # not splitlines(), which also splits at a carriage return
    for line in lines:
        record = None
        with suppress(ValueError, TypeError, AttributeError):  # invalid JSON, a value that is not a number, no object
            found = json.loads(line)
            if isinstance(found.get("step", 0), int):
                for value in found.values() if "step" in found else ():
                    isinstance(value, dict) or float(value)
                record = found
        yield line + b"\n", record


def _open(path: Path) -> FileIO:
    descriptor, _ = open_complete_lines(path)
    return FileIO(descriptor, "a")
