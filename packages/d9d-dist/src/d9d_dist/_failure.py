"""How a rank leaves a job that failed: it tells the others why, through the store, and waits for nobody."""

from contextlib import suppress

import torch.distributed as dist

_KEY = "d9d/first_failure"
_LONGEST = 500  # characters of a message that are told


def report_failure(error: BaseException, *, rank: int) -> None:
    """Tell the other ranks that this one failed; if another failed first, add what it told to the error's notes.

    A collective that fails on this rank often fails because of another rank, whose error says what really happened.
    Waits for nobody, and does nothing where the store cannot be reached any more.
    """
    text = f"{type(error).__name__}: {error}"[:_LONGEST]
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        first = store.compare_set(_KEY, "", f"{rank}\n{text}").decode(errors="replace")
        first_rank, _, first_text = first.partition("\n")
        if first_rank != str(rank) and first_text != text:
            error.add_note(f"Rank {first_rank} failed before this rank: {first_text}")


def abort_process_groups() -> None:
    """End all process groups of this process without waiting for what other ranks have yet to send."""
    try:
        abort = dist.distributed_c10d._abort_process_group
    except AttributeError:  # private, so it may go; then ending is what there is
        dist.destroy_process_group()
    else:
        abort()
