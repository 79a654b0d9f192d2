"""Jobs whose ranks are forked from a warm process, so that a restart after a kill does not repeat imports."""

import ctypes
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from jobs import Ended, script

from d9d_dist.testing import RankPool

When: TypeAlias = float | Literal["in a save"]
"""When to kill a rank: after a number of seconds, or as soon as a checkpoint other than the first is being written."""

NEVER = float("inf")
_PARENT_DIES = 1  # PR_SET_PDEATHSIG
_SECONDS = 120.0  # timeout of a whole job
_ALONE = 5.0  # time for the other ranks to exit after one was killed
# Modules that a job imports while it runs. The warm process imports them once.
_MODULES = ("pretrain", "torch._dynamo", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "tqdm")


def forked_job(
    name: str, arguments: Sequence[str], *, world_size: int, killed: When = NEVER, seed: int = 0, folder: Path
) -> list[Ended] | None:
    """Run an example on several ranks, with unpickling disabled. Return `None` if a rank was killed.

    Args:
        name: Name of the example.
        arguments: Command-line arguments.
        world_size: Number of ranks.
        killed: When to kill a random rank, if the job still runs.
        seed: Seed for the choice of the rank.
        folder: Run folder, whose checkpoints are watched.
    """
    job = _Job(name, list(arguments), world_size, killed, seed, str(folder))
    (ended,) = _warm_process().run(_in_warm_process, job, world_size=1, timeout=_SECONDS + _ALONE)
    return None if ended is None else [Ended(**each) for each in ended]


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    arguments: list[str]
    world_size: int
    killed: When
    seed: int
    folder: str


@cache
def _warm_process() -> RankPool:
    """Return a separate process: a process cannot be forked after it ran a backward pass."""
    return RankPool()


def _in_warm_process(job: _Job) -> list[dict[str, Any]] | None:
    for module in _MODULES:
        importlib.import_module(module)
    meeting = Path(tempfile.mkdtemp(prefix="d9d-job-"))
    try:
        children = {_fork(job, rank, meeting): rank for rank in range(job.world_size)}
        victim = random.Random(job.seed).choice(list(children))  # noqa: S311 - no secret
        was_killed = _watch(children, victim, job.killed, Path(job.folder) / "checkpoints")
        if was_killed:
            return None
        return [json.loads((meeting / f"ended-{rank}.json").read_text()) for rank in range(job.world_size)]
    finally:
        shutil.rmtree(meeting)


def _watch(children: dict[int, int], victim: int, killed: When, checkpoints: Path) -> bool:
    """Wait for all ranks. Kill the victim at its time, and then the ranks that wait for it, as a launcher does.

    Returns:
        True if the victim was killed.
    """
    left, was_killed = set(children), False
    start, before = time.monotonic(), _partials(checkpoints)
    deadline = start + _SECONDS
    while left and time.monotonic() < deadline:
        is_time = _is_saving(checkpoints, before) if killed == "in a save" else time.monotonic() - start >= killed
        if is_time and not was_killed and victim in left:
            os.kill(victim, signal.SIGKILL)
            was_killed, deadline = True, time.monotonic() + _ALONE
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.001)
    for child in left:
        os.kill(child, signal.SIGKILL if was_killed else signal.SIGUSR1)  # SIGUSR1 makes it write its stacks
        time.sleep(0 if was_killed else 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert was_killed or not left, f"ranks {sorted(children[child] for child in left)} hang"
    return was_killed


def _is_saving(checkpoints: Path, before: set[tuple[str, int]]) -> bool:
    """Return True if a checkpoint other than the first is being written."""
    return bool(_partials(checkpoints) - before) and any(checkpoints.glob("step-????????"))


def _partials(checkpoints: Path) -> set[tuple[str, int]]:
    """Return the names and modification times of partial checkpoints, also those of killed writers."""
    found: set[tuple[str, int]] = set()
    for path in checkpoints.glob("*.partial"):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _fork(job: _Job, rank: int, meeting: Path) -> int:
    child = os.fork()
    if child == 0:
        _be_rank(job, rank, meeting)
    return child


def _be_rank(job: _Job, rank: int, meeting: Path) -> NoReturn:
    """Run a rank, in the child process."""
    try:
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
        ranks = job.world_size
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in place.items()})
        torch.set_num_threads(1)  # in the only thread: replaces the thread pool that did not survive the fork
        _forbid_unpickling()
        store = dist.FileStore(str(meeting / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        ended = script(job.name, job.arguments)
        (meeting / f"ended-{rank}.json").write_text(json.dumps(asdict(ended)))
    except BaseException:
        (meeting / f"ended-{rank}.json").write_text(json.dumps(asdict(Ended(1, "", traceback.format_exc()))))
    os._exit(0)


def _forbid_unpickling() -> None:
    """Disable unpickling, of files and of messages between ranks."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise AssertionError("something is unpickled")

    sys.addaudithook(lambda event, arguments: refuse() if event == "pickle.find_class" else None)
    for module, reader in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        setattr(module, reader, refuse)
    setattr(dist.distributed_c10d, "_unpickler", refuse)  # noqa: B010 - private attribute of torch
