"""Failure reports: a failing rank publishes its error in the store and exits without waiting for other ranks.

A collective usually fails because another rank failed. A rank whose collective failed therefore looks for the cause
before it publishes. The cause is the error of another rank, or a process on this machine that exited or is stopped.

The first report wins, in the order of the store: clocks of hosts may differ. A rank that hosts the store keeps it until
all ranks have read the report, because the store ends with its process.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from d9d_dist.errors import StartupTimeoutError, UserError
from d9d_dist.failures.peers import peers_here

FIRST_FAILURE = "d9d/first_failure"
"""Store key with the first failure: the rank, a line break and the error message."""

NODE_FOLDER = "D9D_NODE_FOLDER"
"""Environment variable with a folder through which a node's launcher and its ranks communicate; see `d9d-torchrun`."""

FIRST_FAILURE_FILE = "first_failure"
"""File in this folder: the rank that failed first, a line break, and its exit code; empty if that is unknown."""

PUBLISHED = "d9d_published"
"""Attribute of the error that was published first: a launcher may end its rank as soon as others have exited."""

_NAMED = "d9d_first_failure"  # attribute of the error of a rank that did not fail first
_EXIT_CODE = "d9d/exit_code/{}"  # store key with the exit code of a rank that has published a failure
_NUM_READ = "d9d/num_failure_read"  # number of ranks that are done with the store, including ended ranks
_LONGEST = 500  # maximum length of a message in characters; longer messages are truncated
_CAUSE_SECONDS = 1.0  # time limit for finding the cause of a failed collective
_STORE_SECONDS = 5.0  # time limit for all requests of a report, and for keeping the store
_POLL_SECONDS = 0.02
# Part of the source path in gloo's error messages. Gloo raises plain RuntimeErrors, NCCL raises DistErrors.
_GLOO = "/gloo/"


class Failure(NamedTuple):
    """Rank that failed, and its error or the state of its process."""

    rank: int
    text: str


def report_failure(error: BaseException, *, rank: int, world_size: int, store_place: str) -> None:
    """Publish the error of this rank. If another rank failed first, add that rank's error to the notes of `error`.

    Does not wait for other ranks, but searches for the cause of a failed collective for up to one second. `store_place`
    is that of `DistributedContext`.
    """
    has_reported = within(
        _STORE_SECONDS, lambda: _report(dist.distributed_c10d._get_default_store(), error, rank, world_size)
    )
    if not has_reported and is_victim(error):
        error.add_note(describe_lost_store(store_place))


def within(seconds: float, use_store: Callable[[], None]) -> bool:
    """Call a function that uses the store; return True if it succeeds in time.

    The call runs in a thread, because a request to a host that is cut off from the network has no timeout.
    """
    has_succeeded = threading.Event()

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            use_store()
            has_succeeded.set()

    thread = threading.Thread(target=run, name="d9d-failure", daemon=True)
    thread.start()
    thread.join(seconds)
    return has_succeeded.is_set()


def publish_failure(store: dist.Store, rank: int, text: str, *, code: int | None = None, num_ended: int = 0) -> Failure:
    """Publish a failure unless another one was published before; return the first failure.

    `code` is the exit code of the rank, if known. `num_ended` is the number of ranks that have ended without a report,
    and so will not read this failure.
    """
    mine = f"{rank}\n{text}"
    if code is not None:
        store.set(_EXIT_CODE.format(rank), str(code))
    first = store.compare_set(FIRST_FAILURE, "", mine).decode(errors="replace")
    if num_ended and first == mine:
        store.add(_NUM_READ, num_ended)
    return _tell_launcher(store, _parse(first))


def first_failure(store: dist.Store) -> Failure | None:
    """Return the first failure, or `None`."""
    if not store.check([FIRST_FAILURE]):
        return None
    return _tell_launcher(store, _parse(store.get(FIRST_FAILURE).decode(errors="replace")))


def _tell_launcher(store: dist.Store, first: Failure) -> Failure:
    """Write the first failure for the launcher of this node, once; return it."""
    path = Path(os.environ.get(NODE_FOLDER, ""), FIRST_FAILURE_FILE)
    if NODE_FOLDER in os.environ and not path.exists():
        key = _EXIT_CODE.format(first.rank)
        code = store.get(key).decode() if store.check([key]) else ""
        with suppress(OSError):
            new = path.with_suffix(f".{os.getpid()}")  # several ranks may write
            new.write_text(f"{first.rank}\n{code}", encoding="utf-8")
            new.replace(path)
    return first


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with an exception, under `d9d_loop.cli_main`."""
    match error:
        case UserError():
            return 2
        case StartupTimeoutError():
            return 124
        case KeyboardInterrupt():
            return 130
        case SystemExit(code=int(code)):
            return code
        case _:
            return 1


def name_first_failure(error: BaseException, first: Failure, *, rank: int) -> None:
    """Add the first failure to this rank's error and its notes, once, unless this rank failed first."""
    note = f"Rank {first.rank} failed before this rank: {first.text}"
    if first.rank != rank and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
        vars(error)[_NAMED] = first


def named_failure(error: BaseException) -> Failure | None:
    """Return the first failure that `name_first_failure` has added to an error; `None` if there is none."""
    return vars(error).get(_NAMED)


def describe(error: BaseException) -> str:
    """Return type and message of an error for the other ranks."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST]


def describe_lost_store(place: str) -> str:
    """Return a message for a store that does not answer."""
    return (
        f"The job's store, which {place} hosts, does not answer: that process was killed or is stopped, its host is "
        "down, or the network between the hosts is cut."
    )


def leave_store(store: dist.Store, *, world_size: int, is_host: bool) -> None:
    """Mark this rank as done with the store. The rank that hosts the store waits for the others, up to 5 seconds."""

    def leave() -> None:
        num_read = store.add(_NUM_READ, 1)
        while is_host and num_read < world_size:
            time.sleep(_POLL_SECONDS)
            num_read = store.add(_NUM_READ, 0)

    within(_STORE_SECONDS, leave)


def is_victim(error: BaseException) -> bool:
    """Return True for an error of a collective, or one that it caused: it does not say why the peer failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and _GLOO in str(cause)):
            return True
        cause = cause.__cause__
    return False


def abort_process_groups() -> None:
    """Destroy all process groups of this process without waiting for pending collectives."""
    try:
        abort = dist.distributed_c10d._abort_process_group
    except AttributeError:  # a private function, which torch may remove
        dist.destroy_process_group()
    else:
        abort()


def _report(store: dist.Store, error: BaseException, rank: int, world_size: int) -> None:
    text = describe(error)
    if not is_victim(error):
        first = publish_failure(store, rank, text, code=exit_code_of(error))
        if first.rank == rank:
            vars(error)[PUBLISHED] = True
    elif (found := _cause(store, rank, world_size)) is not None:
        first = found
    else:
        error.add_note(
            "This rank lost its connection to another rank, which did not report an error: it was killed, or its host "
            "is down or cut off from the network."
        )
        return
    if first.text != text:
        name_first_failure(error, first, rank=rank)


def _cause(store: dist.Store, rank: int, world_size: int) -> Failure | None:
    """Return the first published failure; if a local rank's process has ended or is stopped, publish that as a failure.

    Returns `None` if neither is found in time.
    """
    others = peers_here(store, (other for other in range(world_size) if other != rank))
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline:
        if (first := first_failure(store)) is not None:
            return first
        for peer in others:
            if (state := peer.state()) != "runs":
                return publish_failure(store, peer.rank, f"its {peer.describe()} {state}.", num_ended=1)
        time.sleep(_POLL_SECONDS)
    return None


def _parse(failure: str) -> Failure:
    rank, _, text = failure.partition("\n")
    return Failure(int(rank), text)
