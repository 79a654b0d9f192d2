"""Ranks forked from this process for one call, so that each test starts without imports."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from file_calls import Counting, Fault, file_calls

from d9d_dist import DistributedContext, MeshConfig

_SECONDS = 60.0


def run_forked(
    work: Callable[[DistributedContext], None], folder: Path, *, world_size: int, faults: Mapping[int, Fault]
) -> list[int]:
    """Call `work` on every rank, with one fault per rank for its calls below `folder`.

    Returns:
        For each rank 0 if it succeeded, -9 if it was killed, 1 if it raised because another rank was killed.

    Raises:
        AssertionError: If a rank raises although no rank was killed, or hangs. The message contains the errors of
            all ranks.
    """
    meeting = folder.with_name(f"{folder.name}.meeting-{time.monotonic_ns()}")
    log = meeting.with_suffix(".log")
    children: dict[int, int] = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _be_rank(work, rank, world_size, meeting=meeting, log=log, folder=folder, fault=faults.get(rank))
        children[child] = rank
    codes = [0] * world_size
    deadline = time.monotonic() + _SECONDS
    while children:
        child, status = os.waitpid(next(iter(children)), os.WNOHANG)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise AssertionError(f"ranks {sorted(children.values())} hang; the others said: {_said(log)}")
        else:
            children = {**dict(list(children.items())[1:]), **dict(list(children.items())[:1])}
            time.sleep(0.002)
    if 1 in codes and -9 not in codes:
        raise AssertionError(_said(log))
    return codes


def _said(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else "nothing"


def _be_rank(
    work: Callable[[DistributedContext], None],
    rank: int,
    world_size: int,
    *,
    meeting: Path,
    log: Path,
    folder: Path,
    fault: Fault | None,
) -> NoReturn:
    """Run in the forked child only."""
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 2)
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"D9D_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"})
        torch.set_num_threads(1)
        store = dist.FileStore(str(meeting), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        with MeshConfig(data_parallel_shard=-1).build() as ctx, file_calls(folder, fault or Counting()):
            work(ctx)
        code = 0
    except BaseException:
        os.write(2, f"rank {rank}: {traceback.format_exc()}".encode())
    os._exit(code)
