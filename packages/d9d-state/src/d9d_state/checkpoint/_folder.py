"""Folder of a store: complete checkpoints, and deletion of old, incomplete and damaged ones."""

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from d9d_state import _files
from d9d_state._partial_folder import partial_of
from d9d_state.checkpoint.info import CheckpointInfo, open_complete, step_of
from d9d_state.checkpoint.retention import Retention
from d9d_state.errors import ProcessLimitError, StateError, describe
from d9d_state.folder_lock import LOCK_NAME

RUN_ID_NAME = "run_id"  # file with the run's id, beside the checkpoints: tells whose steps the local tiers hold
_LOGGER = logging.getLogger("d9d.state")


def newest_first(folder: Path, *, only_run: str | None, log_level: int = logging.DEBUG) -> Iterator[CheckpointInfo]:
    """Iterate over the complete checkpoints of a folder, newest first; log why other entries are skipped."""
    if not folder.is_dir():
        return
    paths = [path for path in sorted(folder.iterdir()) if path.name not in (LOCK_NAME, RUN_ID_NAME)]
    foreign = [path for path in paths if step_of(path.name) < 0]
    ours = [path for path in paths if step_of(path.name) >= 0]
    for path in [*foreign, *sorted(ours, key=lambda path: step_of(path.name), reverse=True)]:
        try:
            info = open_complete(path)
            if only_run is not None and info.run_id != only_run:
                raise StateError(f"it belongs to run {info.run_id}, not to {only_run}.")
            yield info
        except ProcessLimitError:
            raise
        except StateError as reason:
            level = logging.WARNING if _is_disk_error(reason) else log_level
            _LOGGER.log(level, "skipping %s: %s", path, reason)


def delete_old(folder: Path, retention: Retention, *, run_id: str, saved_step: int, damaged: Collection[Path]) -> None:
    """Delete checkpoints by the retention policy, except the one just saved; only log deletion errors."""
    try:
        found = [info for info in newest_first(folder, only_run=run_id) if info.folder not in damaged]
    except (OSError, ProcessLimitError) as error:
        _LOGGER.warning("%s could not be read, so no old checkpoint is deleted: %s", folder, describe(error))
        return
    found.sort(key=lambda info: info.step == saved_step, reverse=True)
    kept = retention.kept(found)
    for info in found:
        if info.step in kept:
            continue
        try:
            # Rename first: a killed deletion then leaves a partial folder, not a broken checkpoint.
            _files.rename(info.folder, partial_of(info.folder))
            _files.fsync_folder(folder)
            _files.remove_folder(partial_of(info.folder))
        except OSError as error:
            _LOGGER.warning("%s could not be deleted: %s", info.folder, describe(error))


def discard_partials(folder: Path) -> str | None:
    """Delete partial folders; return the error text, or `None` on success."""
    try:
        left = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        return f"{folder} cannot be read: {describe(error)}"
    partials = [path for path in left if path.suffix == ".partial" and step_of(path.stem) >= 0]
    try:
        for path in partials:
            if path.is_dir() and not path.is_symlink():
                _LOGGER.info("deleting the incomplete checkpoint %s", path)
                _files.remove_folder(path)
    except OSError as error:
        return f"partial checkpoints in {folder} could not be deleted: {describe(error)}"
    return None


def move_aside(folder: Path, reason: StateError) -> str | None:
    """Rename a damaged checkpoint; return the error text, or `None` on success."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    _LOGGER.warning("moving %s to %s: %s", folder, aside, reason)
    try:
        _files.rename(folder, aside)
    except OSError as error:
        return f"{folder} is damaged and could not be moved: {describe(error)}"
    return None


def _is_disk_error(error: BaseException | None) -> bool:
    """Return True if an `OSError` other than `FileNotFoundError` is in the cause chain, which calls for a warning."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)
