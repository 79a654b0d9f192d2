"""Check that all ranks see the same folder, before several ranks write to it.

Hosts with local file systems may each have a folder of the same name, perhaps with files of a killed job. So the main
process creates a file with a random name, and every rank checks that it sees this file. The name is new, so no network
file system has cached its absence.
"""

import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from d9d_dist import DistributedContext, agree, gather_json
from d9d_dist.collectives.consensus import name_ranks
from d9d_state import _files
from d9d_state._ranks import is_main
from d9d_state.errors import StateError, describe

_TOKEN = re.compile(r"\.shared-[0-9a-f]{32}")


def sharing_problem(
    folder: Path, ctx: DistributedContext | None, *, needed: bool = True, group: dist.ProcessGroup | None = None
) -> str | None:
    """Return an error text that names the ranks without access to a folder, or `None`. Equal on all ranks.

    Collective: two all-gathers of short texts.

    Raises `StateError` on every rank if the main process cannot write to the folder.
    """
    if ctx is None or ctx.world_size == 1:
        return None
    name, problem = f".shared-{uuid.uuid4().hex}", None
    try:
        if is_main(ctx):
            _files.write_file(folder / name, [])
    except OSError as error:
        problem = f"{folder} is not writable: {describe(error)}"
    # Use only two collectives in total, because each one adds a round trip between distant hosts.
    name, problem = gather_json([name, problem], group)[0]
    if problem is not None:
        agree(problem if is_main(ctx) else None, group, error=StateError)
    token = folder / name
    why = _why_unseen(token) if needed else None
    places: list[Any] = gather_json([socket.gethostname(), str(folder), why], group)
    if is_main(ctx):
        with suppress(OSError):  # the next job deletes it
            _files.remove_file(token)
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for rank, (host, path, reason) in enumerate(places):
        if reason is not None:
            ranks_of.setdefault((host, path, reason), []).append(rank)
    return _report(places[0][0], places[0][1], ranks_of) if ranks_of else None


def is_token(name: str) -> bool:
    """Return True for the name of a file that `sharing_problem` created; a killed job may leave it behind."""
    return _TOKEN.fullmatch(name) is not None


def remove_tokens(folder: Path) -> None:
    """Delete files of `sharing_problem` that killed jobs left in a folder. No other job may be using the folder."""
    for path in folder.iterdir():
        if is_token(path.name):
            _files.remove_file(path)


def _why_unseen(token: Path) -> str | None:
    """Return `None` if this rank sees the file, "" if the file is missing, or the error text of `stat`."""
    try:
        os.stat(token)  # noqa: PTH116
    except FileNotFoundError:
        return ""
    except OSError as error:
        return describe(error)
    return None


def _report(main_host: str, main_path: str, ranks_of: Mapping[tuple[str, str, str], Sequence[int]]) -> str:
    named = [
        f"{name_ranks(ranks)} on {host}" + (f" in {path}" if path != main_path else "") + (f" ({why})" if why else "")
        for (host, path, why), ranks in ranks_of.items()
    ]
    return (
        f"{main_path} of rank 0 on {main_host} is not seen by {'; '.join(named)}; expected one folder for all ranks. "
        "Use a folder on a file system that every host mounts at the same path."
    )
