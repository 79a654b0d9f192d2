"""Jobs whose ranks are forked from a warm process and then fail; reports how each rank ended."""

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
from collections.abc import Callable, Mapping
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
    (ended,) = warm_process().run(
        _launch, partial(job, **named), arguments, world_size, unwaited, world_size=1, timeout=_SECONDS + 60
    )
    return ended


@cache
def warm_process() -> RankPool:
    """Return a separate process: a process cannot be forked after it ran a backward pass."""
    return RankPool()


def _launch(job: Callable[..., None], arguments: tuple[Any, ...], world_size: int, unwaited: int | None) -> list[Rank]:
    folder = Path(tempfile.mkdtemp(prefix="d9d-faults-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    try:
        return fork_ranks(
            lambda rank: be_rank(job, arguments, Place(folder, rank), _environment(rank, world_size, store.port)),
            folder,
            world_size=world_size,
            unwaited=unwaited,
        )
    finally:
        shutil.rmtree(folder)


def fork_ranks(
    run: Callable[[int], NoReturn], folder: Path, *, world_size: int, unwaited: int | None = None
) -> list[Rank]:
    """Call `run(rank)` in a forked process for each rank; return how they ended. `folder` is that of their `Place`."""
    importlib.import_module("d9d_loop.resilience")
    importlib.import_module("torch._dynamo")
    children: dict[int, int] = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            run(rank)
        children[child] = rank
    codes, times = _wait(children, unwaited)
    start = float((folder / "fault").read_text()) if (folder / "fault").exists() else None
    return [
        Rank(codes[rank], _errors(folder, rank), None if start is None else times[rank] - start)
        for rank in range(world_size)
    ]


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


def _environment(rank: int, world_size: int, port: int) -> dict[str, Any]:
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def be_rank(
    job: Callable[..., None], arguments: tuple[Any, ...], place: Place, environment: Mapping[str, Any]
) -> NoReturn:
    """Run a rank in this process, which was forked for it. Its stderr is written to the folder of `place`."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
        os.dup2(os.open(place.folder / f"errors-{place.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.environ.update({name: str(value) for name, value in environment.items()}, D9D_DEVICE="cpu")
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
