"""Keeps a run's values in a text file of one JSON object a line, which any tool reads and a kill cannot spoil."""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_dist import UserError
from d9d_metrics.trackers._files import make_folder, replace_file, sync
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.values import Picture, Tracked, to_json

_UNSAFE = re.compile(r"[^\w.-]")
RESERVED_NAMES = frozenset({"step", "time", "config"})


@final
class JsonlTracker:
    """Appends to a JSON Lines file.

    A call of `log` writes `{"step": 10, "time": 1767225600.0, "loss": 2.5}`, where the time is in seconds since 1970,
    and `log_config` writes `{"time": 1767225600.0, "config": {...}}`. Numbers that JSON does not know are written as
    the strings `"nan"`, `"inf"` and `"-inf"`, which Python's `float` and pandas' `to_numeric` read; `read_metrics`
    gives numbers back. A distribution is `{"histogram": {...}}`, text is `{"text": ...}`, and a picture becomes a file
    beside this one, which `{"picture": ...}` names. Each line is one write straight to the operating system: what was
    logged survives the process, however it ends.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the file for appending, with its folder if needed; a last line that a kill cut short is dropped.

        Args:
            path: The file, usually `metrics.jsonl` in the run's folder.
            clock: Gives the time of a line, in seconds.
        """
        self._path = path
        self._clock = clock
        make_folder(path.parent)
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        sync(path.parent)

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Drop the lines of later steps.

        The file is replaced as a whole, so a kill leaves either the old one or the new one.

        Raises:
            UserError: If a line is not a JSON object; the file stays as it was.
        """
        kept = [line for line, record in _lines(self._path) if record.get("step", step) <= step]
        self._file.close()
        replace_file(self._path, b"".join(kept))
        self._file = self._path.open("ab", buffering=0)

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Append a line with the configuration."""
        self._append({"time": self._clock(), "config": redact_secrets(config)})

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Append a line with the values of a step.

        Raises:
            UserError: If a value has the name of one of the line's own fields.
        """
        if taken := RESERVED_NAMES & values.keys():
            raise UserError(f"got values named {sorted(taken)}, which a line of {self._path} uses itself; rename them.")
        written = {name: self._written(step, name, value) for name, value in values.items()}
        self._append({"step": step, "time": self._clock(), **written})

    def flush(self) -> None:
        """Bring the lines to the disk. They survive the process as they are, the machine from now on."""
        os.fsync(self._file.fileno())

    def state_dict(self) -> dict[str, JsonValue]:
        """Return nothing: the file is found by its name."""
        return {}

    def close(self) -> None:
        """Bring the lines to the disk, and close the file."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def _written(self, step: int, name: str, value: Tracked) -> JsonValue:
        """What stands in the line for a value."""
        if not isinstance(value, Picture):
            return to_json(value)
        file = self._path.with_name(f"{self._path.stem}-pictures") / f"{_UNSAFE.sub('_', name)}-{step}.png"
        make_folder(file.parent)
        replace_file(file, value.png)
        return {"picture": f"{file.parent.name}/{file.name}"}

    def _append(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            # A part of a line stays until the file is opened again, which drops it; nothing may be written behind it.
            self._file.close()
            raise OSError(errno.ENOSPC, "a line was cut short, the disk seems to be full", str(self._path))


@final
class JsonlTrackerConfig(BaseModel):
    """Chooses a JSON Lines file in the run's folder.

    Attributes:
        kind: The word that chooses this tracker.
        file: Name of the file, relative to the run's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["jsonl"] = "jsonl"
    file: str = "metrics.jsonl"

    def check(self) -> None:
        """Do nothing: it needs no package."""

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Make the tracker of the file in the run's folder."""
        path = run_dir / self.file
        return BackgroundTracker(lambda: JsonlTracker(path), name=f"{self.kind} ({path})", start_seconds=30.0)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Read what a `JsonlTracker` logged.

    Args:
        path: The file; a last line that is still being written is left out.

    Returns:
        One mapping for each call of `log`, in order: the numbers by name, with `step` and `time`. Configurations,
        distributions, text and pictures are left out.

    Raises:
        UserError: If a line is not a JSON object.
    """
    return [
        {name: float(value) for name, value in record.items() if not isinstance(value, dict)} | {"step": record["step"]}
        for _, record in _lines(Path(path))
        if "step" in record
    ]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the complete lines of a file with what they say."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            yield line, _parse(line, f"line {number} of {path}")


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{place} is {line[:40]!r}; expected a JSON object. Delete the line or the file.")
    return record


def _drop_torn_line(path: Path) -> None:
    """Cut off what follows the last newline."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        replace_file(path, content[: content.rfind(b"\n") + 1])
