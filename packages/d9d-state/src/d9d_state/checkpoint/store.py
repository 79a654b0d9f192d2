"""The folder of a job's checkpoints: which one is the newest that can be trusted, and how the next one gets there."""

import logging
import math
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, final

from torch import Tensor

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._consensus import agree, broadcast_int, exchange_json, is_main, num_ranks
from d9d_state._partial_folder import partial_of
from d9d_state._shared_folder import remove_tokens, sharing_problem
from d9d_state.checkpoint._background import Background
from d9d_state.checkpoint._commit import SaveJob, write_checkpoint
from d9d_state.checkpoint._load import load_tensors, misfits
from d9d_state.checkpoint._lock import LOCK_NAME, FolderLock
from d9d_state.checkpoint._staging import Staging
from d9d_state.checkpoint._verify import num_threads
from d9d_state.checkpoint.info import CheckpointInfo, folder_name, open_complete, step_of
from d9d_state.checkpoint.newest import newest_sound, verify_together
from d9d_state.checkpoint.retention import Retention
from d9d_state.checkpoint.save_plan import SavePlanner
from d9d_state.errors import ProcessLimitError, StateError, describe
from d9d_state.json_value import JsonValue, dump_json

_LOGGER = logging.getLogger("d9d.state")


@final
class CheckpointStore:
    """The checkpoints of one run in one folder, one immutable sub-folder `step-00000100` for each step that was saved.

    A sub-folder appears under that name only when every byte of it is on the disk, and is never changed afterwards. As
    a context manager it finishes what is still being written when it is left.

    Attributes:
        folder: Where they are. Nothing is created before the first save.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
        run_id: str | None = None,
    ) -> None:
        """Name the folder; it is not touched.

        Args:
            folder: Where the checkpoints are or will be.
            keep_last: How many to keep; older ones are deleted after a save. Short for `Retention(last=keep_last)`.
            retention: Which ones to keep, where that depends on more. `None`, as `keep_last`, keeps all.
            run_id: Which run it is; checkpoints of other runs are skipped, and never deleted. `None` takes those of any
                run, and goes on with the run that the newest is of, or starts one.

        Raises:
            UserError: If `keep_last` is less than 1, or both it and `retention` are given.
        """
        if keep_last is not None and retention is not None:
            raise UserError("got keep_last and retention; expected one of them. Use Retention(last=...).")
        if keep_last is not None and keep_last < 1:
            raise UserError(f"got keep_last = {keep_last}; expected at least 1, or None to keep every checkpoint.")
        self.folder = Path(folder).absolute()
        self._retention = retention or Retention(last=keep_last)
        self._only_run = run_id
        self._run_id = run_id
        self._planner, self._staging, self._background = SavePlanner(), Staging(), Background()
        self._damaged: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        """Finish what is being written; if that fails on the way out of another error, the log says so."""
        try:
            self.close()
        except StateError:
            if kind is None:
                raise

    def complete(self) -> list[CheckpointInfo]:
        """Every complete checkpoint, newest first. What else lies in the folder is skipped, and the log says why.

        Complete means that the manifest is sound and each file has the size that it says. Digests are not compared:
        `newest` and `load` do that. Needs no process group.

        Raises:
            StateError: If the folder cannot be read, or a limit keeps this process from opening files.
        """
        try:
            return list(self._newest_first(log_level=logging.WARNING))
        except OSError as error:
            raise StateError(f"{self.folder} cannot be read: {describe(error)}") from error

    def newest(self, ctx: DistributedContext | None = None, *, verify: bool = True) -> CheckpointInfo | None:
        """The checkpoint of the highest step that is complete and undamaged, or `None` if there is none.

        All digests are compared, shared out over the ranks and their threads. Where one rank finds damage, or cannot
        see what the main process sees, all ranks go on to the next older checkpoint, and the log says why.

        Args:
            ctx: With several ranks the choice is one for all, and collective; `None` looks for itself.
            verify: Whether to compare digests. Without, `load` does it.
        """
        self.wait()
        candidates = self._newest_first(log_level=logging.WARNING) if is_main(ctx) else iter(())
        return newest_sound(self.folder, candidates, ctx, verify=verify, damaged=self._damaged)

    def check_new(self, ctx: DistributedContext | None = None) -> None:
        """Refuse to start anew in a folder with checkpoints: for when `newest` found none that is sound. Collective.

        Raises:
            StateError: On every rank, if the main process sees a folder with the name of a checkpoint.
        """
        problem, names = None, []
        try:
            if is_main(ctx) and self.folder.is_dir():
                names = sorted(path.name for path in self.folder.iterdir() if step_of(path.name) >= 0)
        except OSError as error:
            problem = f"{self.folder} cannot be read: {describe(error)}"
        if names:
            problem = (
                f"{self.folder} holds {', '.join(names)}, but none of them can be loaded; the log says why. "
                "Repair what is wrong, or move them away to start anew."
            )
        agree(problem, ctx)

    def prepare(self, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Plan a save, and make room for the copy that `save_async` takes, so that the first is as fast. Collective.

        The room is made in a thread. It is as large as what this rank will write.

        Args:
            tensors: As `save` gets them.
            ctx: The ranks; `None` for a process on its own.

        Raises:
            StateError: On every rank, if the tensors cannot be saved.
            ValueError: If a process on its own cannot save a tensor; if `ctx` is missing on several ranks.
        """
        num_ranks(ctx)
        plan = self._planner.plan(tensors, ctx)
        self._background.group(ctx)
        self._staging.reserve(plan, 0 if ctx is None else ctx.rank)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue = None,
        rank_state: JsonValue = None,
        metric: float | None = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Write a checkpoint; when this returns it is complete on the disk, and older ones may be gone. Collective.

        A kill at any moment leaves the checkpoints that were there, or those and the new one.

        Args:
            step: Number of optimizer steps that were done.
            tensors: Plain ones, which are equal on all ranks that have them, and `DTensor`s, of which each shard is
                written once. Ranks may hold different names, as pipeline stages do.
            state: What is the same on every rank; the main process's is written.
            rank_state: What is this rank's own, such as its random state.
            metric: How good the model is, for `Retention(best=...)`. One that is not finite counts as none.
            ctx: The ranks; `None` for a process on its own.

        Raises:
            UserError: If there is a sound checkpoint of that step already.
            ValueError: If something is no tensor or no JSON; if `ctx` is missing on several ranks.
            StateError: On every rank, if writing failed on one, or a save before this one did in the background.
        """
        job = self._begin(step, tensors, state=state, rank_state=rank_state, metric=metric, ctx=ctx)
        write_checkpoint(job, self._planner.local_parts(tensors, job.plan, job.rank))
        self._delete_old(job)

    def save_async(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue = None,
        rank_state: JsonValue = None,
        metric: float | None = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Copy what this rank writes to host memory, and write it in a thread; else as `save`. Collective.

        When this returns the tensors may change. One save is in flight: this waits for the one before. What goes wrong
        later is raised by `raise_if_failed`, the next save, `wait` and `close`, whichever comes first.

        Args:
            step: As in `save`, like all that follows.
            tensors: What to save.
            state: What is the same on every rank.
            rank_state: What is this rank's own.
            metric: How good the model is.
            ctx: The ranks.

        Raises:
            UserError: If there is a sound checkpoint of that step already.
            ValueError: If something is no tensor or no JSON; if `ctx` is missing on several ranks.
            StateError: On every rank, if the save before this one failed, or tensors cannot be saved.
        """
        job = self._begin(step, tensors, state=state, rank_state=rank_state, metric=metric, ctx=ctx)
        group = self._background.group(ctx)
        copies: dict[str, Tensor] = {}
        problem = None
        try:
            parts = self._planner.local_parts(tensors, job.plan, job.rank)
            copies = self._staging.copy(parts, job.plan, job.rank)
        except Exception as error:  # whatever it is, the others wait for the agreement
            problem = f"{job.folder} could not be copied to host memory: {error}"
        agree(problem, ctx)

        def work() -> None:
            write_checkpoint(job, copies, group=group)
            self._delete_old(job)

        self._background.start(f"saving {job.folder}", work)

    def raise_if_failed(self) -> None:
        """Raise what went wrong in the background. Cheap and local: call it every step.

        Raises:
            StateError: If a save failed, once.
        """
        self._background.raise_if_failed()

    def wait(self) -> None:
        """Wait until what is being written in the background is complete.

        Raises:
            StateError: If it failed, and nobody was told yet.
        """
        self._background.wait()

    def close(self) -> None:
        """Finish what is being written. The same as leaving the context, and as `wait`: the store can be used again.

        Raises:
            StateError: If a save failed, and nobody was told yet.
        """
        self.wait()

    def load(self, info: CheckpointInfo, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Fill tensors from a checkpoint, in place, whatever mesh it was saved on. Collective.

        Unless `newest` did it, all digests are verified, shared out over the ranks, before a value is written.

        Args:
            info: The same checkpoint on each rank, from `newest(ctx)` or `complete()`.
            tensors: What to fill, with the global shapes and the dtypes that were saved. May be a part of what the
                checkpoint holds.
            ctx: The ranks; `None` for a process on its own.

        Raises:
            StateError: On every rank, if a file is damaged, or a tensor is missing or of another shape or dtype.
            ValueError: If `ctx` is missing on several ranks.
        """
        num_ranks(ctx)
        agree(misfits(info, tensors), ctx)
        # All or none verify: a rank that has the checkpoint from elsewhere cannot do it alone.
        if not all(exchange_json(info.is_verified, ctx)):
            problems = verify_together(info, ctx)
            if problems is not None:
                raise StateError(f"{problems} Move {info.folder} away to resume from the checkpoint before it.")
        problem = None
        try:
            load_tensors(info, tensors, threads=num_threads(ctx))
        except (OSError, ValueError, StateError) as error:
            problem = f"{info.folder} could not be read: {describe(error)}"
        agree(problem, ctx)

    @contextmanager
    def locked(self, ctx: DistributedContext | None = None) -> Generator[None]:
        """Keep other jobs out of the folder for as long as the body runs. Collective.

        The main process holds the lock, which the system gives back if that dies. The folder is made if it is absent,
        and every rank must see it: a job learns before its first step that hosts have folders of their own. A save in
        the background is waited for before the lock is given back.

        Args:
            ctx: The ranks; `None` for a process on its own.

        Raises:
            UserError: On every rank, if another job has the lock, naming its host and process; if ranks do not see the
                folder of the main process, naming the ranks and their hosts.
            StateError: On every rank, if the folder cannot be made or locked.
        """
        lock = FolderLock(self.folder)
        refusal, problem = "", None
        if is_main(ctx):
            try:
                lock.acquire(self._current_run_id())
                remove_tokens(self.folder)
            except UserError as error:
                refusal = str(error)
            except (OSError, StateError) as error:
                problem = f"{self.folder} could not be locked: {describe(error)}"
        try:
            agree(problem, ctx)
            refusals = [text for text in exchange_json(refusal, ctx) if text != ""]
            if refusals:
                raise UserError(str(refusals[0]))
            unshared = sharing_problem(self.folder, ctx)
            if unshared is not None:
                raise UserError(unshared)
            yield
        finally:
            try:
                self._background.join()
            finally:
                # Whoever interrupts the waiting leaves the lock to the end of the process, which the thread delays.
                if not self._background.is_busy:
                    lock.release()

    def discard_partials(self, ctx: DistributedContext | None = None) -> None:
        """Delete what killed saves and killed deletions left; call it when a job starts. Collective.

        Raises:
            StateError: On every rank, if the main process cannot delete it.
        """
        self.wait()
        agree(self._discard_partials() if is_main(ctx) else None, ctx)

    def _discard_partials(self) -> str | None:
        """Delete partial folders; return what went wrong, `None` if nothing did."""
        try:
            left = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError as error:
            return f"{self.folder} cannot be read: {describe(error)}"
        partials = [path for path in left if path.suffix == ".partial" and step_of(path.stem) >= 0]
        try:
            for path in partials:
                if path.is_dir() and not path.is_symlink():
                    _LOGGER.info("deleting %s, which was never completed", path)
                    _files.remove_folder(path)
        except OSError as error:
            return f"what killed saves left in {self.folder} could not be deleted: {describe(error)}"
        return None

    def _begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue,
        rank_state: JsonValue,
        metric: float | None,
        ctx: DistributedContext | None,
    ) -> SaveJob:
        """All that a save does before it touches the disk, but for a damaged checkpoint that is in its way."""
        texts, folder, run_id, problem = (b"", b""), self.folder, "", None
        is_alone = num_ranks(ctx) == 1
        try:
            self._background.wait()
            texts = dump_json(state), dump_json(rank_state)
            folder = self.folder / folder_name(step)
            run_id = self._current_run_id() if is_main(ctx) else ""
        except (StateError, ValueError, OSError) as error:
            if is_alone:
                raise
            problem = describe(error)
        agree(problem, ctx)
        plan = self._planner.plan(tensors, ctx)
        self._make_way(folder, ctx)
        if metric is not None and not math.isfinite(metric):
            _LOGGER.warning("the metric of step %d is %s, which counts as none", step, metric)
            metric = None
        metric = None if metric is None else float(metric)
        return SaveJob(folder, run_id, step, metric, _mesh_shape(ctx), plan, *texts, ctx)

    def _make_way(self, folder: Path, ctx: DistributedContext | None) -> None:
        """Move a damaged checkpoint of the same step aside, and refuse to replace a sound one."""
        problem, exists = None, False
        try:
            if is_main(ctx) and folder.exists():
                if folder in self._damaged:
                    raise StateError("a rank found it damaged.")
                open_complete(folder).verify()
                exists = True
        except (OSError, ProcessLimitError) as error:
            problem = f"{folder} cannot be read: {describe(error)}"
        except StateError as reason:
            problem = _move_aside(folder, reason)
        exists = bool(broadcast_int(int(exists), ctx))
        agree(problem, ctx)
        if exists:
            raise UserError(f"{folder} is complete already, and checkpoints are never overwritten; save another step.")

    def _delete_old(self, job: SaveJob) -> None:
        """Delete what is not to be kept; never what was just saved. A failure to delete stops nobody."""
        if not is_main(job.ctx) or self._retention.last is None:
            return
        try:
            found = [info for info in self._newest_first() if info.folder not in self._damaged]
        except (OSError, ProcessLimitError) as error:
            _LOGGER.warning("%s could not be read, so nothing is deleted: %s", self.folder, describe(error))
            return
        own = [info for info in found if info.run_id == job.run_id]
        own.sort(key=lambda info: info.step == job.step, reverse=True)
        kept = self._retention.kept(own)
        for info in own:
            if info.step in kept:
                continue
            try:
                # Under this name a deletion that is killed half-way cannot leave a torn checkpoint.
                _files.rename(info.folder, partial_of(info.folder))
                _files.fsync_folder(self.folder)
                _files.remove_folder(partial_of(info.folder))
            except OSError as error:
                _LOGGER.warning("%s could not be deleted: %s", info.folder, describe(error))

    def _current_run_id(self) -> str:
        if self._run_id is None:
            newest = next(self._newest_first(), None)
            self._run_id = uuid.uuid4().hex if newest is None else newest.run_id
        return self._run_id

    def _newest_first(self, *, log_level: int = logging.DEBUG) -> Iterator[CheckpointInfo]:
        if not self.folder.is_dir():
            return
        paths = [path for path in sorted(self.folder.iterdir()) if path.name != LOCK_NAME]
        foreign = [path for path in paths if step_of(path.name) < 0]
        ours = [path for path in paths if step_of(path.name) >= 0]
        for path in [*foreign, *sorted(ours, key=lambda path: step_of(path.name), reverse=True)]:
            try:
                info = open_complete(path)
                if self._only_run is not None and info.run_id != self._only_run:
                    raise StateError(f"it is of the run {info.run_id}, not of {self._only_run}.")
                yield info
            except ProcessLimitError:
                raise
            except StateError as reason:
                level = logging.WARNING if _is_disk_error(reason) else log_level
                _LOGGER.log(level, "skipping %s: %s", path, reason)


def _is_disk_error(error: BaseException | None) -> bool:
    """Whether a disk failed to give what is there; that is news, unlike a folder that is no checkpoint."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)


def _move_aside(folder: Path, reason: StateError) -> str | None:
    """Rename a damaged checkpoint; the text of the problem, if that fails."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    _LOGGER.warning("moving %s to %s: %s", folder, aside, reason)
    try:
        _files.rename(folder, aside)
    except OSError as error:
        return f"{folder} is damaged and could not be moved: {describe(error)}"
    return None


def _mesh_shape(ctx: DistributedContext | None) -> dict[str, int]:
    if ctx is None:
        return {}
    mesh = ctx.mesh_for("regular")
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
