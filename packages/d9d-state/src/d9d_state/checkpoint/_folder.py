"""Folder of a store: complete checkpoints, deletion of old, incomplete and damaged ones, and the id of the run."""

import logging
import math
import uuid
from collections.abc import Collection, Iterator
from typing import final

from d9d_dist import DistributedContext, gather_json
from d9d_state import _files
from d9d_state._member import AnyPath
from d9d_state._partial_folder import partial_of
from d9d_state._ranks import failing_together, is_main
from d9d_state.checkpoint.info import CheckpointInfo, open_complete, step_of
from d9d_state.checkpoint.manifest import MANIFEST_NAME
from d9d_state.checkpoint.retention import Retention
from d9d_state.errors import StateError, UnreadableError, VersionError, as_state_error, describe
from d9d_state.folder_lock import LOCK_NAME
from d9d_state.object_path import ObjectPath

RUN_ID_NAME = "run_id"  # file with the run id, beside the checkpoints; identifies the run's steps in the local tiers
_LOGGER = logging.getLogger("d9d.state")


def newest_first(
    folder: AnyPath,
    *,
    only_run: str | None,
    skipped: set[str] | None = None,
    above: int = -1,
    up_to: float = math.inf,
    refuse_versions: bool = False,
) -> Iterator[CheckpointInfo]:
    """Iterate over the complete checkpoints of a folder, newest first; log why other entries are skipped.

    Only checkpoints of the run `only_run`, or of any run, with steps above `above` and up to `up_to` are opened. With
    `refuse_versions`, a checkpoint of another format version raises `VersionError`, instead of being skipped.
    Disk errors are warnings. Other reasons are warnings if `skipped` is given and does not contain them; it collects
    them, so that each is logged once. Checkpoints that are saved during the iteration follow.
    """
    seen = {LOCK_NAME, RUN_ID_NAME}
    # List the folder again after its last entry: a job may have saved a step and deleted the listed ones meanwhile.
    while paths := [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.name not in seen]:
        seen |= {path.name for path in paths}
        foreign = [path for path in sorted(paths) if step_of(path.name) < 0]
        ours = [path for path in paths if max(above, -1) < step_of(path.name) <= up_to]
        for path in [*foreign, *sorted(ours, key=lambda path: step_of(path.name), reverse=True)]:
            try:
                info = open_complete(path)
                if only_run is not None and info.run_id != only_run:
                    raise StateError(f"it belongs to run {info.run_id}, not to {only_run}.")
                yield info
            except UnreadableError:
                raise
            except (StateError, VersionError) as reason:
                if refuse_versions and isinstance(reason, VersionError):
                    raise
                text = f"skipping {path}: {reason}"
                is_new = skipped is not None and text not in skipped
                _LOGGER.log(logging.WARNING if is_new or _is_disk_error(reason) else logging.DEBUG, "%s", text)
                if skipped is not None:
                    skipped.add(text)


@final
class RunId:
    """Id of a store's run: the given id, else the newest checkpoint's, else from the `run_id` file, else a new id."""

    def __init__(self, root: AnyPath, given: str | None) -> None:
        self.given = given
        self._root = root
        self._current: str | None = given
        self._written = ""

    def known(self) -> str | None:
        """Return the id of the run that the store continues, or `None`. Main process only."""
        if self.given is not None:
            return self.given
        newest = next(newest_first(self._root, only_run=None), None)
        if newest is not None:
            return newest.run_id
        path = self._root / RUN_ID_NAME
        with as_state_error(f"{path} is damaged; delete it to start a new run", ValueError):
            return path.read_bytes().decode() if path.is_file() else None

    def current(self) -> str:
        """Return the id under which the store saves. Main process only."""
        if self._current is None:
            self._current = self.known() or uuid.uuid4().hex
        return self._current

    def shared_known(self, ctx: DistributedContext | None) -> str | None:
        """Return the main process's `known`. Collective; raises `StateError` on every rank if it cannot be read."""
        run_id = None
        with failing_together(ctx, f"{self._root} cannot be read"):
            run_id = self.known() if is_main(ctx) else None
        found = gather_json(run_id, alone=ctx is None)[0]
        return None if found is None else str(found)

    def written(self, ctx: DistributedContext | None) -> str:
        """Return the main process's `current` and write it beside the checkpoints. Collective on the first call.

        Without a given id or a checkpoint, this file identifies the run's steps in local tiers. If a user deletes the
        folder to start from scratch, these steps are not used.
        """
        if not self._written:
            run_id = ""
            with failing_together(ctx, f"{self._root} could not be written"):
                if is_main(ctx):
                    run_id = self.current()
                    _files.make_folder(self._root)
                    _files.replace_file(self._root / RUN_ID_NAME, run_id.encode())
            self._written = str(gather_json(run_id, alone=ctx is None)[0])
        return self._written


def delete_old(folder: AnyPath, retention: Retention, *, run_id: str, damaged: Collection[AnyPath]) -> None:
    """Delete the checkpoints that `retention` does not keep, but never the newest. Errors are only logged."""
    try:
        found = [info for info in newest_first(folder, only_run=run_id) if info.root not in damaged]
    except (OSError, UnreadableError) as error:
        _LOGGER.warning("%s could not be read, so no old checkpoint is deleted: %s", folder, describe(error))
        return
    kept = retention.kept({info.step: info.metric for info in found})
    for info in found:
        if info.step in kept:
            continue
        try:
            delete(info.root)
        except (OSError, StateError) as error:
            _LOGGER.warning("%s could not be deleted: %s", info.root, describe(error))


def delete(folder: AnyPath) -> None:
    """Delete a checkpoint. A killed deletion leaves an incomplete checkpoint, which `discard_partials` deletes."""
    if isinstance(folder, ObjectPath):
        folder.remove_all(first=[MANIFEST_NAME])
        return
    _files.rename(folder, partial_of(folder))
    _files.fsync(folder.parent)
    _files.remove_folder(partial_of(folder))


def discard_partials(folder: AnyPath) -> None:
    """Delete partial folders; raise `StateError` if that fails."""
    if isinstance(folder, ObjectPath):
        discard_incomplete(folder)
        return
    with as_state_error(f"{folder} cannot be read"):
        left = sorted(folder.iterdir()) if folder.is_dir() else []
    with as_state_error(f"partial checkpoints in {folder} could not be deleted"):
        for path in left:
            is_partial = path.suffix == ".partial" and step_of(path.stem) >= 0
            if is_partial and path.is_dir() and not path.is_symlink():
                _LOGGER.info("deleting the incomplete checkpoint %s", path)
                _files.remove_folder(path)


def discard_incomplete(folder: ObjectPath) -> None:
    """Delete incomplete checkpoints in an object store that are older than the newest complete checkpoint.

    Their incomplete uploads are deleted too. Newer incomplete checkpoints are kept: a save of the same step continues
    their uploads. Raises `StateError` if the deletion fails.
    """
    with as_state_error(f"incomplete checkpoints in {folder} could not be deleted"):
        steps = {step_of(path.name): path for path in folder.iterdir() if step_of(path.name) >= 0}
        complete = {step for step, path in steps.items() if (path / MANIFEST_NAME).is_file()}
        newest = max(complete, default=-1)
        for step in steps.keys() - complete:
            if step < newest:
                _LOGGER.info("deleting the incomplete checkpoint %s", steps[step])
                steps[step].remove_all()
        folder.abort_uploads(lambda name: 0 <= step_of(name) <= newest)


def move_aside(folder: AnyPath, reason: StateError) -> None:
    """Rename a damaged checkpoint, or delete it from an object store; raise `StateError` if that fails.

    In an object store, an incomplete checkpoint is kept: the next save of the step continues it.
    """
    if isinstance(folder, ObjectPath):
        with as_state_error(f"{folder} is damaged and could not be deleted"):
            if (folder / MANIFEST_NAME).exists():
                _LOGGER.warning("deleting %s: %s", folder, reason)
                delete(folder)
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    _LOGGER.warning("moving %s to %s: %s", folder, aside, reason)
    with as_state_error(f"{folder} is damaged and could not be moved"):
        _files.rename(folder, aside)


def _is_disk_error(error: BaseException | None) -> bool:
    """Return True if the first `OSError` in the chain of causes is not a `FileNotFoundError`."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)
