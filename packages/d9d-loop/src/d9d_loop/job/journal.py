"""Journal of a run: its starts, its progress, and the causes of interruptions; one JSON object per line.

A killed job writes no final line, so the main process records its progress while it trains. Every rank records a
failure, because the main process may be the one that failed. The journal is never truncated, unlike the metrics of a
resumed run.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, final

from d9d_dist import DistributedContext
from d9d_dist.failures.first_failure import Failure
from d9d_loop.job.end_command import report_failure
from d9d_loop.report.run_history import JOURNAL, read_journal
from d9d_loop.report.run_status import write_failure, write_status
from d9d_loop.resilience.node_files import claims_report
from d9d_metrics.trackers.redaction import redact_text

_SECONDS = 10.0  # interval of progress records in seconds
_LONGEST = 1000  # maximum length of a recorded cause, in characters


@final
class Journal:
    """Journal in a run folder. I/O errors are ignored, because training does not depend on the journal.

    With each record, and at least every 10 seconds from the start to the end, the main process replaces the status file
    `status.json`, with `steps` and `hosts` of the job. The rank that records the first failure after a start runs the
    shell command `on_failure`.
    """

    def __init__(
        self,
        folder: Path,
        ctx: DistributedContext,
        *,
        steps: int | None = None,
        hosts: Sequence[str] = (),
        on_failure: str | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._file, self._ctx, self._next, self._saved = folder / JOURNAL, ctx, 0.0, 0
        self._num_earlier = len(self._read())
        self._hosts = hosts
        self._status: dict[str, Any] = {"steps": steps, "hosts": sorted(set(hosts))}
        self._lock, self._has_ended = threading.Lock(), threading.Event()

    def started(self, step: int, run_id: str) -> None:
        """Record that the job starts, or resumes after `step` completed steps, with the run id of its checkpoints."""
        if self._ctx.is_main_process:
            self._saved = self._status["saved"] = step
            self._write("started", step=step, ranks=self._ctx.world_size, run_id=run_id)
            threading.Thread(target=self._show_life, name="d9d-status", daemon=True).start()

    def progress(self, step: int, *, saved: int | None) -> None:
        """Record the number of completed steps at most every 10 seconds, or at once if `saved` is new.

        `saved` is the last step whose checkpoint is complete; `None` if this process has saved none.
        """
        is_new = saved is not None and saved != self._saved
        if self._ctx.is_main_process and (is_new or time.monotonic() >= self._next):
            self._next = time.monotonic() + _SECONDS
            self._saved = saved or self._saved
            self._write("progress", step=step, saved=self._saved)

    def slow(self, step: int, parts: Sequence[str]) -> None:
        """Record ranks that have become slow. Call this method on the main process only."""
        self._write("slow", step=step, parts=list(parts))

    def ended(self, step: int, how: str) -> None:
        """Record that the job ended as intended, with a checkpoint of `step`: "finished", or the cause of the stop."""
        if self._ctx.is_main_process:
            self._has_ended.set()
            self._write("ended", step=step, saved=step, how=how)

    def failed(self, cause: str, first: Failure | None = None) -> None:
        """Record that this rank failed, and the cause without secrets. Any rank may call this method.

        `first` is the rank that failed before this one, or for which this one waits, if it is known.
        """
        with self._lock:
            self._has_ended.set()
        rank, cause = self._ctx.rank, redact_text(cause)[:_LONGEST]
        culprit: dict[str, Any] = {}
        named = None
        if first is not None:
            host = self._hosts[first.rank] if first.rank < len(self._hosts) else None
            text = redact_text(first.text).partition("\n")[0][:_LONGEST]
            culprit = {"first": {"rank": first.rank, "host": host, "cause": text}}
            named = f"rank {first.rank}: {text}"
        self._write("failed", rank=rank, host=socket.gethostname(), cause=cause, **culprit)
        if self._first_failed() == rank and claims_report():
            report_failure(self._file.parent, self._on_failure, rank=rank, cause=cause, first=named)
        elif self._ctx.is_main_process:  # its last status may have replaced that of the first failure
            write_failure(self._file.parent, cause, first=named, is_first=False)

    def _first_failed(self) -> int:
        """Return the rank of the first failure since the last start; 0 if the journal cannot be written or read."""
        first = None
        for record in self._read()[self._num_earlier :]:
            if record["event"] == "started":
                first = None
            elif record["event"] == "failed" and first is None:
                first = record["rank"]
        return first or 0

    def _read(self) -> list[Mapping[str, Any]]:
        with suppress(OSError):
            return read_journal(self._file.parent)
        return []

    def _write(self, event: Literal["started", "progress", "slow", "ended", "failed"], **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n"
        # A single write in append mode, because several ranks may write to the file.
        with suppress(OSError), self._file.open("a+b", buffering=0) as file:
            file.write((line if self._is_complete(file) else f"\n{line}").encode())
        if self._ctx.is_main_process and event != "failed":
            self._write_status(event, values)

    def _show_life(self) -> None:
        """Replace the status regularly: a step, an evaluation or a save may take longer than the interval."""
        while not self._has_ended.wait(_SECONDS):
            with self._lock, suppress(OSError):
                if not self._has_ended.is_set():
                    self._status["time"] = round(time.time(), 3)
                    write_status(self._file.parent, self._status)

    def _is_complete(self, file: FileIO) -> bool:
        """Return False if the last line is incomplete, after a full disk or a power loss: the caller then ends it."""
        if (size := file.seek(0, os.SEEK_END)) == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"

    def _write_status(self, event: str, values: Mapping[str, Any]) -> None:
        now, status = round(time.time(), 3), self._status
        if values.get("saved", 0) > status.get("saved", 0):
            status["saved_at"] = now
        status |= {name: values[name] for name in ("step", "saved", "run_id") if name in values}
        status |= {"time": now, "state": values["how"] if event == "ended" else "running", "error": None}
        with self._lock, suppress(OSError):
            write_status(self._file.parent, status)
