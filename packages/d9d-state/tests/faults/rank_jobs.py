"""Functions that ranks run in the fault tests."""

import errno
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from file_calls import Counting, Fail, Fault, FullDisk, file_calls
from power_loss import Operation, Recording
from tiny_checkpoint import save_on_ranks

from d9d_dist import DistributedContext, MeshConfig
from d9d_state import CheckpointStore, StateError


def ranks() -> DistributedContext:
    """Build a context in which every tensor is sharded over all ranks."""
    return MeshConfig(data_parallel_shard=-1).build()


def save_counted(folder: str, background: bool) -> int:
    """Save step 3; return the number of calls of this rank."""
    counting = Counting()
    with ranks() as ctx, file_calls(Path(folder), counting):
        save_on_ranks(CheckpointStore(folder, keep_last=1), 3, ctx, background=background)
    return len(counting.names)


def save_recorded(root: str, background: bool) -> list[Operation]:
    """Save step 3; return the recorded calls of this rank."""
    recording = Recording(Path(root))
    with ranks() as ctx, file_calls(Path(root), recording):
        save_on_ranks(CheckpointStore(Path(root) / "checkpoints", keep_last=1), 3, ctx, background=background)
    return recording.operations


def save_with_errors(start: str, folder: str, rank: int, points: list[int], background: bool) -> tuple[list[str], int]:
    """Save step 3 with each fault at each of the calls of a rank, and then step 4 without.

    Returns:
        Problems found on this rank, and the number of errors it raised.
    """
    logging.getLogger("d9d.state").setLevel(logging.ERROR)
    wrong: list[str] = []
    told = 0
    with ranks() as ctx:
        for fault in (fault for at in points for fault in (Fail(at), Fail(at, errno.ENOSPC), FullDisk(at))):
            if ctx.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(start, folder)
            ctx.barrier()
            store = CheckpointStore(folder, keep_last=1)
            message = _save_failing(store, ctx, fault if ctx.rank == rank else Counting(), background=background)
            told += message is not None
            if message is not None and f"rank {rank}: " not in message:
                wrong.append(f"{fault} is told as {message}")
            if _differs(ctx, message is None):
                wrong.append(f"{fault} is told on some ranks only")
            # The job continues with the same ranks and the same store.
            save_on_ranks(store, 4, ctx)
            newest = store.newest(ctx)
            if newest is None or newest.step != 4:
                wrong.append(f"after {fault} nothing can be saved")
    return wrong, told


def _save_failing(store: CheckpointStore, ctx: DistributedContext, fault: Fault, *, background: bool) -> str | None:
    try:
        with file_calls(store.folder, fault):
            save_on_ranks(store, 3, ctx, background=background)
    except StateError as error:
        return str(error)
    return None


def _differs(ctx: DistributedContext, value: bool) -> bool:
    total = torch.tensor([int(value)])
    dist.all_reduce(total)
    return int(total) not in (0, ctx.world_size)
