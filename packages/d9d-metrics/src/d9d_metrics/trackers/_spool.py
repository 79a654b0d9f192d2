"""On-disk queue of tracker entries; undelivered entries survive the process and are delivered at its next start."""

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_dist.durable_files import sync
from d9d_metrics.trackers._files import make_folder, open_complete_lines, replace_file
from d9d_metrics.trackers._outbox import Entry, Outbox

_LOGGER = logging.getLogger("d9d.metrics")
_RETRY_SECONDS = 1.0  # between attempts to write, e.g. while the disk is full
_CLOSE_SECONDS = 10.0
_OFFSET_DIGITS = 20


@final
class Spool(Outbox):
    """On-disk queue. A writer thread appends the entries to a file, from which they are delivered.

    The folder has three files. `entries.jsonl` has one entry per line. `delivered` is the number of bytes of
    `entries.jsonl` that the tracker has written durably. `state.json` identifies the tracker's run.

    Entries are delivered at least once. If the process is killed, entries that the tracker received but did not write
    durably are delivered again at the next start. When the tracker has written all entries, the file is truncated.

    Args:
        folder: Folder, created if needed; no other process may use it.
        capacity: Largest number of entries in memory that wait to be written.
        max_bytes: Largest size of the file; further entries are dropped and counted.
    """

    def __init__(self, folder: Path, *, capacity: int = 10_000, max_bytes: int = 2**30) -> None:
        super().__init__(capacity)
        make_folder(folder)
        self._folder, self._path, self._max_bytes = folder, folder / "entries.jsonl", max_bytes
        self._file, self._size = open_complete_lines(self._path)
        self._offset_file = os.open(folder / "delivered", os.O_RDWR | os.O_CREAT, 0o666)
        offset = os.pread(self._offset_file, _OFFSET_DIGITS, 0)
        # The offset is too large if the process was killed between truncating the file and updating `delivered`.
        self._delivered = int(offset) if offset.isdigit() and int(offset) <= self._size else 0
        self._head = self._delivered  # offset of the next entry to deliver; at least `_delivered`
        sync(folder)
        # `_changed` also guards the files and their offsets.
        self._num_skipped = 0
        self._is_drained = False
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="d9d-metrics-spool", daemon=True)
        self._writer.start()

    def head(self) -> Entry | None:
        with self._changed:
            self._changed.wait_for(lambda: self._head < self._size or self._is_drained)
            return Entry.decode(json.loads(self._read_line())) if self._head < self._size else None

    def delivered(self) -> None:
        with self._changed:
            self._head += len(self._read_line())

    def flushed(self) -> None:
        with self._changed:
            self._delivered = self._head
            if self._delivered == self._size:
                os.ftruncate(self._file, 0)
                self._head = self._delivered = self._size = 0
            self._write_offset()

    def failed(self) -> None:
        with self._changed:
            self._head = self._delivered

    def flush(self, seconds: float) -> bool:
        """Wait until all entries are written, and fsync the file; False if that fails or takes too long."""
        is_done = super().flush(seconds)
        try:
            os.fsync(self._file)
        except OSError as error:
            _LOGGER.warning("cannot fsync %s: %s", self._path, error)
            return False
        return is_done

    def forget_after(self, step: int) -> None:
        """Rewrite the file without the undelivered entries of steps after `step`."""
        with self._changed:
            waiting = self._path.read_bytes()[self._delivered :].splitlines(keepends=True)
            entries = [(line, Entry.decode(json.loads(line))) for line in waiting]
            kept = [line for line, entry in entries if entry.method != "log" or entry.step <= step]
            # Reset the offset before replacing the file. If the process is killed in between, entries are delivered
            # twice; in the reverse order, entries would be lost.
            self._head = self._delivered = 0
            self._write_offset()
            replace_file(self._path, b"".join(kept))
            os.close(self._file)
            self._file, self._size = open_complete_lines(self._path)

    def load_state(self) -> dict[str, JsonValue]:
        try:
            return dict(json.loads((self._folder / "state.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def save_state(self, state: Mapping[str, JsonValue]) -> None:
        replace_file(self._folder / "state.json", json.dumps(dict(state)).encode())

    def close(self) -> None:
        """Append the end marker, and wait up to ten seconds for the writer thread."""
        self._closing.set()
        super().close()
        self._writer.join(timeout=_CLOSE_SECONDS)

    def describe_rest(self) -> str:
        """Describe the bytes to deliver at the next start of the run, and lost entries; empty if there are none."""
        waiting = self._size - self._delivered
        lost = self._num_dropped + self._num_put - self._num_done + self._num_skipped
        parts = [f"{waiting} bytes wait in {self._folder} for the next start of the run"] if waiting else []
        return "; ".join([*parts, f"{lost} entries are lost"] if lost else parts)

    def _write_all(self) -> None:
        while (entry := self._take()) is not None:
            self._num_skipped += not self._append(json.dumps(entry.encode()).encode() + b"\n")
            self._count_done()
        with self._changed:
            self._is_drained = True
            self._changed.notify_all()

    def _append(self, line: bytes) -> bool:
        """Append a line; return False if the spool is full, or closes before a write succeeds."""
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
                _LOGGER.warning("cannot write to %s, retrying: %s", self._path, error)
        return False

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = os.pread(self._file, 1 << 16, self._head + len(line))
            line += part[: part.find(b"\n") + 1] or part
        return line

    def _write_offset(self) -> None:
        os.pwrite(self._offset_file, b"%0*d" % (_OFFSET_DIGITS, self._delivered), 0)
