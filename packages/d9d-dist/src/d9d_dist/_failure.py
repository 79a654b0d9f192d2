"""How a rank leaves a job that failed: it tells the others why, through the store, and waits for nobody.

A collective that fails on a rank mostly fails because of another rank. So a rank whose collective failed first looks
for the cause: a rank that has told its own error, or a process of this machine that is gone or stopped.
"""

import time
from contextlib import suppress

import torch.distributed as dist

from d9d_dist.peers import peers_here

FIRST_FAILURE = "d9d/first_failure"
"""The key of the store under which the first rank that fails says so: its rank, a line break, and why."""

_LONGEST = 500  # characters of a message that are told
_CAUSE_SECONDS = 1.0  # for which a victim looks for the cause
_LOOK_SECONDS = 0.02
# What gloo's errors start with, which are plain RuntimeErrors; NCCL's are DistErrors.
_GLOO = "/gloo/"


def report_failure(error: BaseException, *, rank: int, world_size: int) -> None:
    """Tell the other ranks that this one failed; if another failed first, add what it told to the error's notes.

    Waits for no other rank, but up to a second for the cause of a collective that failed, and does nothing where the
    store cannot be reached any more.
    """
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        text = f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST]
        found = (_cause(store, rank, world_size) if is_victim(error) else None) or f"{rank}\n{text}"
        first = store.compare_set(FIRST_FAILURE, "", found).decode(errors="replace")
        first_rank, _, first_text = first.partition("\n")
        if first_rank != str(rank) and first_text != text:
            error.add_note(f"Rank {first_rank} failed before this rank: {first_text}")


def is_victim(error: BaseException) -> bool:
    """Whether an error is that of a collective, which tells of the connection, not of what happened to the peer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def abort_process_groups() -> None:
    """End all process groups of this process without waiting for what other ranks have yet to send."""
    try:
        abort = dist.distributed_c10d._abort_process_group
    except AttributeError:  # private, so it may go; then ending is what there is
        dist.destroy_process_group()
    else:
        abort()


def _cause(store: dist.Store, rank: int, world_size: int) -> str | None:
    """What another rank told, or what this machine shows of one that can tell nothing; `None` if there is neither."""
    others = peers_here(store, (other for other in range(world_size) if other != rank))
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline:
        if store.check([FIRST_FAILURE]):
            return store.get(FIRST_FAILURE).decode(errors="replace")
        for peer in others:
            if (state := peer.state()) != "runs":
                return f"{peer.rank}\nits {peer.describe()} {state}."
        time.sleep(_LOOK_SECONDS)
    return None
