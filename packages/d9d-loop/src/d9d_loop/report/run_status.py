"""Status of a run for operators: a small file that a running job replaces, and the command `d9d-status`."""

import argparse
import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from d9d_dist import UserError
from d9d_loop.cli_main import cli_main
from d9d_loop.report.run_history import JOURNAL, read_journal
from d9d_loop.writable import replace_text

STATUS = "status.json"
_STALE_SECONDS = 60.0  # a job replaces the file every 10 seconds while it trains
_COLUMNS = ("run", "state", "step", "saved", "updated", "hosts", "error")
_WIDEST = 80


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Replace the status file of a run folder atomically; on a full disk, write to the blocks that it has.

    Raises `OSError` if both fail.
    """
    text = json.dumps(status) + "\n"
    try:
        replace_text(folder / STATUS, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with (folder / STATUS).open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def write_failure(folder: Path, cause: str, *, first: str | None = None, is_first: bool = True) -> None:
    """Set the state in an existing run folder to "failed", with the error if it is the first one of this start.

    `first` describes the failure of another rank that caused this one, if it is known. I/O errors are ignored.
    """
    if not folder.is_dir():  # a start that fails early writes nothing
        return
    status = read_status(folder) or {}
    if status.get("state") != "failed" or is_first:
        status |= {"state": "failed", "error": cause, "first": first}
    with suppress(OSError):
        write_status(folder, {**status, "time": round(time.time(), 3)})


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the status of a run folder; `None` without a readable one."""
    with suppress(OSError, ValueError):
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        return status if isinstance(status, dict) else None
    return None


def describe_runs(folders: Sequence[Path], *, now: float) -> str:
    """Return a table of runs. A folder that is not a run is replaced by the runs in it.

    Raises:
        UserError: If a folder does not exist or cannot be read.
    """
    rows = [_COLUMNS, *(_row(run, now) for folder in folders for run in _runs(folder))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _runs(folder: Path) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}; expected a run folder, or a folder of runs. Check the path."
        ) from None
    return [folder] if _is_run(folder) else list(filter(_is_run, inside))


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (STATUS, JOURNAL))  # False without permission


def _row(run: Path, now: float) -> tuple[str, ...]:
    status = read_status(run)
    if status is None:
        return _row_without_status(run, now)
    state = str(status.get("state"))
    time = status.get("time")
    if state == "running" and _age(time, now) > _STALE_SECONDS:
        state = "no sign of life"
    step = "/".join("-" if status.get(name) is None else str(status[name]) for name in ("step", "steps"))
    hosts = status.get("hosts")
    hosts = ",".join(map(str, hosts)) if isinstance(hosts, list) else ""
    error = " ".join(str(status.get("first") or status.get("error") or "").split())[:_WIDEST]
    return (str(run), state, step, str(status.get("saved", "-")), _ago(time, now), hosts, error)


def _row_without_status(run: Path, now: float) -> tuple[str, ...]:
    """Describe a run of an earlier version, or one whose status is damaged, by its journal."""
    records: list[Mapping[str, Any]] = []
    with suppress(OSError):
        records = read_journal(run)
    step, saved = (
        max((record[name] for record in records if name in record), default="-") for name in ("step", "saved")
    )
    problem = f"{STATUS} cannot be read" if os.path.lexists(run / STATUS) else f"no {STATUS}"
    return (
        str(run),
        "unknown",
        f"{step}/-",
        str(saved),
        _ago(records[-1]["time"] if records else None, now),
        "",
        problem,
    )


def _age(time: object, now: float) -> float:
    return now - time if isinstance(time, int | float) else math.inf


def _ago(time: object, now: float) -> str:
    age = _age(time, now)
    if age < -_STALE_SECONDS:
        return f"{-age:.0f} s ahead of this clock"
    return "-" if math.isinf(age) else f"{max(age, 0.0):.0f} s ago"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: `d9d-status FOLDER...`."""
    parser = argparse.ArgumentParser(prog="d9d-status", description="Print a table of runs, from their status files.")
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, or folders of runs")
    options = parser.parse_args(arguments)
    with cli_main():
        print(describe_runs(options.folders, now=time.time()))


if __name__ == "__main__":
    main()
