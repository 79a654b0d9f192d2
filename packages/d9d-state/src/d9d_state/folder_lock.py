"""File lock that allows one job per folder. The operating system releases it when the process ends or is killed."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import final
from weakref import ref

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._ranks import failing_together, is_main
from d9d_state._shared_folder import remove_tokens, sharing_problem
from d9d_state.errors import StateError
from d9d_state.json_value import dump_json, parse_json

LOCK_NAME = "job.lock"
_POLL_SECONDS = 0.1
_LOGGER = logging.getLogger("d9d.state")
_MAX_BYTES = 4096


@contextmanager
def locked_folder(
    folder: Path, ctx: DistributedContext | None = None, *, run_id: str | None = None, wait_seconds: float = 0.0
) -> Generator["FolderLock"]:
    """Hold an exclusive lock on a folder while the body runs. Collective.

    The folder is created if it does not exist. The main process holds the lock; the operating system releases it if
    that process dies. All ranks check that they see the same folder, so that a job without a shared file system fails
    early. A job that finds the folder locked shows `run_id`; only the main process's value is used. `wait_seconds` is
    the time to wait for another job that holds the lock, such as one that is about to end.

    Raises:
        UserError: On every rank, if ranks do not see the main process's folder; the message names these ranks and their
            hosts.
        StateError: On every rank, if another job holds the lock; the message names the job's host and process. Also if
            the folder cannot be created or locked.
    """
    lock = FolderLock(folder)
    try:
        with failing_together(ctx, f"{folder} could not be locked"):
            if is_main(ctx):
                lock.acquire(run_id, wait_seconds=wait_seconds)
                remove_tokens(folder)
        unshared = sharing_problem(folder, ctx)
        if unshared is not None:
            raise UserError(unshared)
        yield lock
    finally:
        lock.release()


@final
class FolderLock:
    """Exclusive lock on a folder, held from `acquire` to `release` or to the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None

    def acquire(self, run_id: str | None, *, wait_seconds: float = 0.0) -> None:
        """Acquire the lock; if another job holds it for longer, raise `StateError` with its host and process id."""
        _files.make_folder(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._lock(descriptor, wait_seconds)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        # A forked data worker may outlive a killed job; an open copy of the descriptor would still hold the flock.
        lock: ref[FolderLock] = ref(self)
        os.register_at_fork(after_in_child=partial(_close_in_child, lock))
        holder = dump_json({"host": socket.gethostname(), "pid": os.getpid(), "run_id": run_id})
        with suppress(OSError):  # the content is for error messages only; the lock is the flock() above
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder, 0)

    def _lock(self, descriptor: int, wait_seconds: float) -> None:
        deadline = time.monotonic() + wait_seconds
        is_waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                used = f"{self._path.parent} is in use by another job{_describe(os.pread(descriptor, _MAX_BYTES, 0))}"
            else:
                return
            if time.monotonic() >= deadline:
                raise StateError(
                    f"{used}; expected one job per folder. Wait for it, stop it, or use another run folder."
                )
            if not is_waiting:
                _LOGGER.warning("%s; waiting up to %g s for it to end", used, wait_seconds)
                is_waiting = True
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Release the lock. The file stays: after a deletion, two jobs could lock two files of the same name."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def keep(self) -> None:
        """Hold the lock until the process ends: `release` no longer has an effect."""
        self._descriptor = None

    def forget(self) -> None:
        """Close this process's descriptor without unlocking. A forked child calls this; its parent keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def _close_in_child(lock: "ref[FolderLock]") -> None:
    held = lock()
    if held is not None:
        held.forget()


def _describe(data: bytes) -> str:
    """Describe the lock's holder from the file's content, which may be incomplete."""
    try:
        holder = parse_json(data)
    except ValueError:
        return ""
    if not isinstance(holder, dict):
        return ""
    run = f" of run {holder['run_id']}" if isinstance(holder.get("run_id"), str) else ""
    return f" (process {holder.get('pid')} on {holder.get('host')}{run})"
