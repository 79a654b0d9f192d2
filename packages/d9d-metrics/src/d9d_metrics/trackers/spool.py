"""Where values wait for a tracker that may be down: in a folder, so that they outlive the process too."""

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_metrics.trackers._files import make_folder, replace_file, sync
from d9d_metrics.trackers.outbox import Entry, Flush, GoBack, Inbox, RunConfig, StepValues
from d9d_metrics.trackers.values import from_json, to_json

_LOGGER = logging.getLogger("d9d.metrics")
_RETRY_SECONDS = 1.0  # between attempts to write to a full disk
_CLOSE_SECONDS = 10.0
_DIGITS = 20


@final
class Spool:
    """A queue in a folder: `put` hands an entry to a thread that appends it to a file; delivery reads it from there.

    The folder has `entries.jsonl`, one entry a line; `delivered`, the number of bytes of it that the tracker has
    written out; and `state.json`, what finds the tracker's run again. Delivery is at least once: entries that the
    tracker took, but had not written out when the process was killed, are delivered again at the next start. The file
    is emptied whenever the tracker has written out everything in it.

    Args:
        folder: The folder, made if needed; no other process may use it.
        capacity: How many entries may wait for the disk.
        max_bytes: How large the file may become; what comes beyond is left out, and counted.
    """

    def __init__(self, folder: Path, *, capacity: int = 10_000, max_bytes: int = 2**30) -> None:
        make_folder(folder)
        self._folder, self._path, self._max_bytes = folder, folder / "entries.jsonl", max_bytes
        self._file, self._size = _open_whole_lines(self._path)
        self._note = os.open(folder / "delivered", os.O_RDWR | os.O_CREAT, 0o666)
        noted = os.pread(self._note, _DIGITS, 0)
        # A kill may have come between the emptying of the file and the note of it.
        self._delivered = int(noted) if noted.isdigit() and int(noted) <= self._size else 0
        self._head = self._delivered  # bytes that the tracker took, written out or not
        sync(folder)
        self._incoming = Inbox()
        self._capacity = capacity
        self._num_put = self._num_handled = self._left_out = 0
        # Guards the files and what is known about them; `put` does not take it.
        self._changed = threading.Condition()
        self._is_drained = False
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="d9d-metrics-spool", daemon=True)
        self._writer.start()

    def put(self, entry: Entry) -> None:
        """Hand an entry to the thread that writes."""
        if len(self._incoming) >= self._capacity and not isinstance(entry, GoBack | Flush):
            self._left_out += 1
        else:
            self._num_put += 1
            self._incoming.put(entry)

    def head(self) -> Entry | None:
        """Read the oldest undelivered entry, waiting for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._head < self._size or self._is_drained)
            return _decoded(self._read_line()) if self._head < self._size else None

    def delivered(self) -> None:
        """Go on to the next entry."""
        with self._changed:
            self._head += len(self._read_line())

    def flushed(self) -> None:
        """Note that the entries before the head need not be delivered again."""
        with self._changed:
            self._delivered = self._head
            if self._delivered == self._size:
                os.ftruncate(self._file, 0)
                self._head = self._delivered = self._size = 0
            self._note_delivered()

    def failed(self) -> None:
        """Go back to the oldest entry that may be lost with the tracker."""
        with self._changed:
            self._head = self._delivered

    def flush(self, seconds: float) -> bool:
        """Wait until everything is on the disk."""
        wanted = self._num_put
        self._incoming.look_now()
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._num_handled >= wanted, timeout=seconds)
            try:
                os.fsync(self._file)
            except OSError as error:
                _LOGGER.warning("cannot bring %s to the disk: %s", self._path, error)
                return False
        return is_done

    def forget_after(self, step: int) -> None:
        """Rewrite the file without the undelivered entries of later steps."""
        with self._changed:
            waiting = self._path.read_bytes()[self._delivered :].splitlines(keepends=True)
            kept = [line for line in waiting if not _is_after(step, _decoded(line))]
            # First the note, then the file: a kill between them delivers twice; the other way round it would lose some.
            self._head = self._delivered = 0
            self._note_delivered()
            replace_file(self._path, b"".join(kept))
            os.close(self._file)
            self._file, self._size = _open_whole_lines(self._path)

    def load_state(self) -> dict[str, JsonValue]:
        """Read the state; empty if there is none, or none that is sound."""
        try:
            return dict(json.loads((self._folder / "state.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        """Write the state, at once."""
        replace_file(self._folder / "state.json", json.dumps(dict(state)).encode())

    def close(self) -> None:
        """Let the thread that writes end once it is through, and `head` after the last entry."""
        self._closing.set()
        self._incoming.put(None)
        self._incoming.look_now()
        self._writer.join(timeout=_CLOSE_SECONDS)

    def describe_rest(self) -> str:
        """Return what waits for the next start, and what is lost."""
        waiting, lost = self._size - self._delivered, self._left_out + self._num_put - self._num_handled
        parts = [f"{waiting} bytes wait in {self._folder} for the next start of the run"] if waiting else []
        return "; ".join([*parts, f"{lost} entries are lost"] if lost else parts)

    def _write_all(self) -> None:
        while (entry := self._incoming.get()) is not None:
            is_kept = self._append(_encoded(entry))
            with self._changed:
                self._left_out += not is_kept
                self._num_handled += 1
                self._changed.notify_all()
        with self._changed:
            self._is_drained = True
            self._changed.notify_all()

    def _append(self, line: bytes) -> bool:
        """Append a line, waiting for room on the disk until the spool is closed; whether it was written."""
        if self._size + len(line) > self._max_bytes:
            return False
        while not self._try_append(line):
            if self._closing.wait(_RETRY_SECONDS):
                return self._try_append(line)
        return True

    def _try_append(self, line: bytes) -> bool:
        with self._changed:
            try:
                if os.write(self._file, line) == len(line):
                    self._size += len(line)
                    return True
                os.ftruncate(self._file, self._size)
            except OSError as error:
                _LOGGER.warning("cannot write to %s, will try again: %s", self._path, error)
        return False

    def _read_line(self) -> bytes:
        """Return the line at the head."""
        line = b""
        while not line.endswith(b"\n"):
            part = os.pread(self._file, 1 << 16, self._head + len(line))
            line += part[: part.find(b"\n") + 1] or part
        return line

    def _note_delivered(self) -> None:
        os.pwrite(self._note, b"%0*d" % (_DIGITS, self._delivered), 0)


def _open_whole_lines(path: Path) -> tuple[int, int]:
    """Open a file for reading and appending, without a last line that a kill cut short; the descriptor and its size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = path.read_bytes().rfind(b"\n") + 1
    os.ftruncate(file, size)
    return file, size


def _is_after(step: int, entry: Entry) -> bool:
    return isinstance(entry, StepValues) and entry.step > step


def _encoded(entry: Entry) -> bytes:
    match entry:
        case StepValues(step, values):
            record = {"step": step, "values": {name: to_json(value) for name, value in values.items()}}
        case RunConfig(config):
            record = {"config": dict(config)}
        case GoBack(step):
            record = {"go_back_to": step}
        case Flush():
            record = {"flush": True}
    return json.dumps(record).encode() + b"\n"


def _decoded(line: bytes) -> Entry:
    match json.loads(line):
        case {"step": int(step), "values": dict(values)}:
            return StepValues(step, {name: from_json(value) for name, value in values.items()})
        case {"go_back_to": int(step)}:
            return GoBack(step)
        case {"flush": True}:
            return Flush()
        case record:
            return RunConfig(record["config"])
