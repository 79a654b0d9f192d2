"""Jobs whose ranks are forked from a warm process and then fail; reports how each rank ended."""

import atexit
import ctypes
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from d9d_dist.testing import RankPool

_PARENT_DIES = 1  # PR_SET_PDEATHSIG
_SECONDS = 150.0  # timeout of a whole job
_AFTER_OTHERS = 0.3  # seconds for which a rank may outlive all others, if nothing else ends it


@dataclass(frozen=True, slots=True)
class Rank:
    """Outcome of a rank.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it.
        errors: Its stderr.
        seconds: Seconds between the fault and the exit, if there was a fault.
    """

    code: int
    errors: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Shared folder and rank of a process of the job."""

    folder: Path
    rank: int

    def fault_is_now(self) -> None:
        """Start the clock of `Rank.seconds`, unless it is running."""
        with suppress(FileExistsError), (self.folder / "fault").open("x") as file:
            file.write(str(time.monotonic()))


def run_forked(
    job: Callable[..., None], *arguments: Any, world_size: int = 2, unwaited: int | None = None, **named: Any
) -> list[Rank]:
    """Call `job(place, *arguments, **named)` on every rank, under a launcher that hosts the store.

    Args:
        job: Function at the top level of a module; it and its arguments are pickled.
        arguments: Positional arguments.
        named: Keyword arguments.
        world_size: Number of ranks.
        unwaited: Rank that is killed after all others have ended.
    """
    (ended,) = _warm_process().run(
        _launch, partial(job, **named), arguments, world_size, unwaited, world_size=1, timeout=_SECONDS + 60
    )
    return ended


@cache
def _warm_process() -> RankPool:
    """Return a separate process: a process cannot be forked after it ran a backward pass."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def _launch(job: Callable[..., None], arguments: tuple[Any, ...], world_size: int, unwaited: int | None) -> list[Rank]:
    importlib.import_module("d9d_loop.resilience")
    importlib.import_module("torch._dynamo")
    folder = Path(tempfile.mkdtemp(prefix="d9d-faults-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    children: dict[int, int] = {}
    try:
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                _be_rank(job, arguments, Place(folder, rank), world_size, store.port)
            children[child] = rank
        codes, times = _wait(dict(children), unwaited)
        start = float((folder / "fault").read_text()) if (folder / "fault").exists() else None
        return [
            Rank(codes[rank], _errors(folder, rank), None if start is None else times[rank] - start)
            for rank in range(world_size)
        ]
    finally:
        shutil.rmtree(folder)


def _wait(left: dict[int, int], unwaited: int | None) -> tuple[dict[int, int], dict[int, float]]:
    codes: dict[int, int] = {}
    times: dict[int, float] = {}
    deadline = time.monotonic() + _SECONDS
    while left:
        if time.monotonic() > deadline or list(left.values()) == [unwaited]:
            time.sleep(_AFTER_OTHERS)
            for child in left:
                os.kill(child, signal.SIGKILL)
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                rank = left.pop(child)
                codes[rank], times[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.002)
    return codes, times


def _errors(folder: Path, rank: int) -> str:
    return (folder / f"errors-{rank}").read_text(encoding="utf-8", errors="replace")


def _be_rank(
    job: Callable[..., None], arguments: tuple[Any, ...], place: Place, world_size: int, port: int
) -> NoReturn:
    """Run a rank, in the child process."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
        os.dup2(os.open(place.folder / f"errors-{place.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        variables = {
            "RANK": place.rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": place.rank,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "GLOO_SOCKET_IFNAME": "lo",
            "D9D_DEVICE": "cpu",
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        # A rank of the pool handles it in native code; a job starts without a handler.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        multiprocessing.current_process().daemon = False  # allows data workers, unlike a rank of the pool
        multiprocessing.set_start_method("fork", force=True)  # forked workers need not import torch again
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.__stderr__ = sys.stderr  # replaces that of the fork server
        torch.set_num_threads(1)
        job(place, *arguments)
        code = 0
    except SystemExit as leave:
        code = int(leave.code or 0)
    except BaseException:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )  # an exception may be the fault
        os.write(2, traceback.format_exc().encode())
    os._exit(code)
