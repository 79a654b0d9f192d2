"""Failure reports: a failing rank publishes its error in the store and exits without waiting for other ranks.

A collective usually fails because another rank failed. A rank whose collective failed therefore looks for the cause
before it publishes. The cause is the error of another rank, or a process on this machine that exited or is stopped.
"""

import time
from contextlib import suppress

import torch.distributed as dist

from d9d_dist.peers import peers_here

FIRST_FAILURE = "d9d/first_failure"
"""Store key with the first failure: the rank, a line break and the error message."""

_LONGEST = 500  # characters; longer messages are truncated
_CAUSE_SECONDS = 1.0  # time limit for finding the cause of a failed collective
_POLL_SECONDS = 0.02
# Part of the source path in gloo's error messages. Gloo raises plain RuntimeErrors, NCCL raises DistErrors.
_GLOO = "/gloo/"


def report_failure(error: BaseException, *, rank: int, world_size: int) -> None:
    """Publish the error of this rank. If another rank failed first, add that rank's error to the notes of `error`.

    Does not wait for other ranks, but searches for the cause of a failed collective for up to one second. Does nothing
    if the store is unreachable.
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
    """Return True for an error of a collective: it reports a broken connection, but not why the peer failed."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def abort_process_groups() -> None:
    """Destroy all process groups of this process without waiting for pending collectives."""
    try:
        abort = dist.distributed_c10d._abort_process_group
    except AttributeError:  # a private function, which torch may remove
        dist.destroy_process_group()
    else:
        abort()


def _cause(store: dist.Store, rank: int, world_size: int) -> str | None:
    """Return the published error of another rank, or the state of a local process that does not run; else `None`."""
    others = peers_here(store, (other for other in range(world_size) if other != rank))
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline:
        if store.check([FIRST_FAILURE]):
            return store.get(FIRST_FAILURE).decode(errors="replace")
        for peer in others:
            if (state := peer.state()) != "runs":
                return f"{peer.rank}\nits {peer.describe()} {state}."
        time.sleep(_POLL_SECONDS)
    return None
