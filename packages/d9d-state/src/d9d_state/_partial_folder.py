"""The `.partial` folder that ranks write to until it is renamed to its final name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_state import _files
from d9d_state._member import AnyPath
from d9d_state._ranks import failing_together, is_main
from d9d_state._shared_folder import sharing_problem
from d9d_state.errors import StateError
from d9d_state.object_path import ObjectPath


def partial_of(target: Path) -> Path:
    """Return the temporary path, ending in `.partial`, that a folder has while it is being written or deleted."""
    return target.with_name(f"{target.name}.partial")


def make_partial(
    target: AnyPath, ctx: DistributedContext | None, *, writes: bool = True, group: dist.ProcessGroup | None = None
) -> None:
    """Create an empty partial folder; raise `StateError` on every rank if a writer does not see it. Collective.

    An object store needs no partial folder. The files of a killed save stay in the store, and the new save continues
    from them.
    """
    partial = partial_path(target)
    if isinstance(partial, ObjectPath):
        return
    with failing_together(ctx, f"{target} could not be written", group=group):
        if is_main(ctx):
            discard_partial(partial)
            _files.make_folder(partial)
    try:
        unshared = sharing_problem(partial, ctx, needed=writes, group=group)
        if unshared is not None:
            raise StateError(unshared)
    except StateError:
        with suppress(OSError):
            if is_main(ctx):
                discard_partial(partial)
        raise


def partial_path(target: AnyPath) -> AnyPath:
    """Return the path under which a checkpoint is written.

    In an object store this is the final path: the manifest, written last, completes the checkpoint.
    """
    return partial_of(target) if isinstance(target, Path) else target


def discard_partial(partial: AnyPath) -> None:
    """Delete a partial folder, if it exists. Files in an object store are kept for the next save of the step."""
    if isinstance(partial, Path) and partial.is_dir():
        _files.remove_folder(partial)


def check_sizes(partial: AnyPath, sizes: Mapping[str, int]) -> None:
    """Raise `OSError` or `ValueError` unless this process sees every file with the size that its rank wrote."""
    for name, size in sizes.items():
        path = partial / name
        found = int(path.info()["size"]) if isinstance(path, ObjectPath) else os.stat(path).st_size  # noqa: PTH116
        if found != size:
            raise ValueError(f"{partial / name} has {found} bytes; expected {size}.")
