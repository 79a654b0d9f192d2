"""Status of a run for operators: a small file that a running job replaces, and the command `d9d-status`."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUS = "status.json"
_STALE_SECONDS = 60.0  # a job replaces the file every 10 seconds while it trains
_COLUMNS = ("run", "state", "step", "saved", "updated", "hosts", "error")
_WIDEST = 80


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Replace the status file of a run folder atomically. Raises `OSError` if that fails."""
    partial = folder / f".{STATUS}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(status) + "\n", encoding="utf-8")
        partial.replace(folder / STATUS)
    finally:
        partial.unlink(missing_ok=True)


def write_failure(folder: Path, cause: str, *, is_first: bool = True) -> None:
    """Set the state in an existing run folder to "failed", with the error if it is the first one of this start.

    I/O errors are ignored.
    """
    if not folder.is_dir():  # a start that fails early writes nothing
        return
    status = read_status(folder) or {}
    if status.get("state") != "failed" or is_first:
        status |= {"state": "failed", "error": cause}
    with suppress(OSError):
        write_status(folder, {**status, "time": round(time.time(), 3)})


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the status of a run folder; `None` without a readable one."""
    with suppress(OSError, ValueError):
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        return status if isinstance(status, dict) else None
    return None


def describe_runs(folders: Sequence[Path], *, now: float) -> str:
    """Return a table of runs. A folder without a status file stands for the run folders in it."""
    runs = [run for folder in folders for run in ([folder] if (folder / STATUS).exists() else sorted(folder.glob("*")))]
    statuses = [(run, status) for run in runs if (status := read_status(run)) is not None]
    rows = [_COLUMNS, *(_row(run, status, now) for run, status in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(run: Path, status: Mapping[str, Any], now: float) -> tuple[str, ...]:
    age = max(now - float(status.get("time", 0)), 0.0)
    state = str(status.get("state"))
    if state == "running" and age > _STALE_SECONDS:
        state = "no sign of life"
    saved = str(status.get("saved", 0))
    error = " ".join(str(status.get("error") or "").split())[:_WIDEST]
    hosts = ",".join(status.get("hosts", ()))
    return (str(run), state, f"{status.get('step')}/{status.get('steps')}", saved, f"{age:.0f} s ago", hosts, error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: `d9d-status FOLDER...`."""
    parser = argparse.ArgumentParser(prog="d9d-status", description="Print a table of runs, from their status files.")
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, or folders of runs")
    print(describe_runs(parser.parse_args(arguments).folders, now=time.time()))


if __name__ == "__main__":
    main()
