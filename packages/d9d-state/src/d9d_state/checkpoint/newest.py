"""Collective choice of the newest undamaged checkpoint: if one rank finds damage, all ranks skip the checkpoint."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from d9d_dist import DistributedContext, gather_json
from d9d_state._member import AnyPath
from d9d_state._ranks import failing_together, is_main, rank_of
from d9d_state.checkpoint._verify import damage, num_threads, parts_of, share_of
from d9d_state.checkpoint.info import CheckpointInfo, folder_name, open_complete
from d9d_state.errors import StateError, UnreadableError

_LOGGER = logging.getLogger("d9d.state")
_MAX_SHOWN = 5  # problems per rank in a message; a failed disk may cause thousands of problems


def newest_sound(
    folder: AnyPath,
    candidates: Iterator[CheckpointInfo],
    ctx: DistributedContext | None,
    *,
    verify: bool,
    damaged: set[AnyPath],
) -> CheckpointInfo | None:
    """Return the first candidate that all ranks see and that no rank finds damaged, or `None`. Collective.

    Only the main process's candidates, sorted newest first, are used. The folders of skipped candidates are added to
    `damaged`. With `verify`, digests are compared. On every rank, raises `StateError` if the folder cannot be read or a
    process limit prevents opening files, and `UserError` if a candidate has another format version.
    """
    while True:
        chosen: CheckpointInfo | None = None
        with failing_together(ctx, f"{folder} cannot be read"):
            chosen = next(candidates, None) if is_main(ctx) else None
        step = gather_json(None if chosen is None else chosen.step, alone=ctx is None)[0]
        if step is None:
            return None
        path = folder / folder_name(step)
        info, problem = _open(path, chosen, ctx)
        if problem is None and info is not None:
            if not verify:
                return info
            problem = verify_together(info, ctx)
            if problem is None:
                return replace(info, is_verified=True)
        damaged.add(path)
        _LOGGER.warning("skipping %s: %s", path, problem)


def verify_together(info: CheckpointInfo, ctx: DistributedContext | None) -> str | None:
    """Verify all digests of a checkpoint; each rank reads its share of the bytes. Collective.

    Returns a text that lists the damaged parts, equal on all ranks, or `None` if there are none. Raises `StateError` on
    every rank if a process limit prevents one rank from opening files.
    """
    ranks = 1 if ctx is None else ctx.world_size
    share = share_of(parts_of(info.manifest), rank=rank_of(ctx), num_ranks=ranks)
    found: list[str] = []
    with failing_together(ctx):
        found = damage(info.root, share, threads=num_threads(ctx))
    shown = found[:_MAX_SHOWN] + ([f"and {len(found) - _MAX_SHOWN} more"] if found[_MAX_SHOWN:] else [])
    problems = _by_rank(gather_json("; ".join(shown), alone=ctx is None))
    return f"{problems} at step {info.step}." if problems else None


def _open(
    path: AnyPath, chosen: CheckpointInfo | None, ctx: DistributedContext | None
) -> tuple[CheckpointInfo | None, str | None]:
    """Open the checkpoint on every rank and compare the manifests with the main process's. Collective."""
    info, problem, digest = chosen, "", ""
    with failing_together(ctx):
        try:
            info = open_complete(path) if info is None else info
            digest = info.manifest.digest
        except UnreadableError:
            raise
        except StateError as error:
            is_missing = isinstance(path, Path) and not os.path.lexists(path)
            reason = f"{socket.gethostname()} does not have it." if is_missing else str(error)
            problem = f"it is not the checkpoint that the main process sees: {reason}"
    digests = gather_json(digest, alone=ctx is None)
    if not problem and digest != digests[0]:
        problem = "its manifest differs from the main process's"
    return info, _by_rank(gather_json(problem, alone=ctx is None)) or None


def _by_rank(texts: Sequence[object]) -> str:
    """Join the non-empty texts; if there are several ranks, prefix each text with its rank."""
    if len(texts) == 1:
        return str(texts[0])
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
