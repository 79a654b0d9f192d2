"""Checkpoints of a run: save, load, find the newest undamaged one in folder and local tiers, delete old ones, lock."""

import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self, final

from torch import Tensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_dist.failures.first_failure import is_victim
from d9d_state import _files
from d9d_state._member import AnyPath, as_folder, as_local
from d9d_state._ranks import failing_together, is_main, mesh_shape, num_ranks, rank_of
from d9d_state.checkpoint._background import Background, Staging
from d9d_state.checkpoint._commit import SaveJob, write_checkpoint
from d9d_state.checkpoint._folder import (
    RunId,
    delete,
    delete_old,
    discard_incomplete,
    discard_partials,
    move_aside,
    newest_first,
)
from d9d_state.checkpoint._load import load_tensors, mismatches
from d9d_state.checkpoint._tier_search import TierStep
from d9d_state.checkpoint._verify import num_threads
from d9d_state.checkpoint.info import AMENDMENT_NAME, CheckpointInfo, folder_name, open_complete, step_of
from d9d_state.checkpoint.local_tier import LocalTier
from d9d_state.checkpoint.manifest import MANIFEST_NAME, with_digest
from d9d_state.checkpoint.newest import newest_sound, verify_together
from d9d_state.checkpoint.retention import Retention
from d9d_state.checkpoint.save_plan import SavePlanner, local_parts
from d9d_state.errors import StateError, UnreadableError, as_state_error, describe
from d9d_state.folder_lock import locked_folder
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.object_path import ObjectPath

_LOGGER = logging.getLogger("d9d.state")


@final
class CheckpointStore:
    """Checkpoints of one run in one folder, with an immutable subfolder such as `step-00000100` per saved step.

    A subfolder gets its final name by an atomic rename after its files are fsynced, and never changes afterwards. As a
    context manager, the store waits for background saves on exit.

    Attributes:
        root: Folder of the checkpoints, or their prefix in an object store. The first save or lock creates the folder.
        tiers: Local tiers, fastest first.
    """

    def __init__(
        self,
        folder: str | AnyPath,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
        run_id: str | None = None,
        tiers: Sequence[LocalTier] = (),
    ) -> None:
        """Create the store without accessing the folder.

        Args:
            folder: Folder of the checkpoints, which need not exist; or a URL of an object store, such as
                `s3://bucket/run`, which fsspec opens.
            keep_last: Number of newest checkpoints to keep after a save. Shorthand for `Retention(last=keep_last)`.
            retention: Retention policy with more rules. If it and `keep_last` are `None`, all checkpoints are kept.
            run_id: Id of the run. Checkpoints of other runs are skipped and never deleted. `None` accepts checkpoints
                of any run, and saves under the run id of the newest one, or under a new id.
            tiers: Local tiers for `save_local`, fastest first. `newest` and `load` use them too.

        Raises:
            UserError: If `keep_last` is not an int of at least 1, or both `keep_last` and `retention` are given.
        """
        if keep_last is not None and retention is not None:
            raise UserError("got both keep_last and retention; expected at most one. Use Retention(last=...).")
        found = as_folder(folder)
        self.root: AnyPath = found.absolute() if isinstance(found, Path) else found
        self._retention = retention or Retention(last=keep_last)
        self._run_id = RunId(self.root, run_id)
        self._planner, self._staging, self._background = SavePlanner(), Staging(), Background()
        self._damaged: set[AnyPath] = set()
        self._skipped: set[str] = set()
        self.tiers = tuple(tiers)
        self._threads = [self._background, *(tier.background for tier in tiers)]

    @property
    def run_id(self) -> str:
        """Id of the run under which the store saves. For the main process only."""
        return self._run_id.current()

    @property
    def is_saving(self) -> bool:
        """True while this process's background save is unfinished, and after it has failed."""
        return self._background.is_busy or self._background.has_failed

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints in a file system; raises `UserError` for an object store."""
        return as_local(self.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_traceback: object) -> None:
        """Wait for the background save. Its error is only logged if another exception is already propagating.

        But it replaces the error of a collective: a rank that has already raised the error of the save has left it.
        """
        try:
            self.close()
        except StateError as failure:
            if error is None or (is_victim(error) and not is_victim(failure)):
                raise

    def complete(self) -> list[CheckpointInfo]:
        """Return every complete checkpoint, newest first. Other entries are skipped, each with one log line per store.

        A complete checkpoint has a valid manifest of this format version and files of the recorded sizes. Digests are
        not verified; `newest` and `load` verify them. No collectives.

        Raises:
            StateError: If the folder cannot be read, or a process limit prevents opening files.
        """
        with as_state_error(f"{self.root} cannot be read", OSError):
            found = newest_first(self.root, only_run=self._run_id.given, skipped=self._skipped)
            return sorted(found, key=lambda info: -info.step)

    def newest(self, ctx: DistributedContext | None = None, *, verify: bool = True) -> CheckpointInfo | None:
        """Return the complete, undamaged checkpoint with the highest step, or `None` if there is none.

        All digests are verified, distributed over the ranks and their threads. If one rank finds damage, or does not
        see the main process's checkpoint, all ranks skip to the next older checkpoint and log the reason. A step of a
        local tier counts if each part or its replica is on a host of the job; the parts may be on different hosts.

        Args:
            ctx: Distributed context: collective, and all ranks get the same checkpoint. `None` searches in this process
                only.
            verify: Verify digests now; otherwise `load` verifies them.

        Raises:
            StateError: If a previous background save failed. Also, on every rank, if the folder cannot be read or a
                process limit prevents opening files.
            UserError: On every rank, if a checkpoint that is newer than all undamaged checkpoints has another format
                version.
        """
        self.wait()
        local = self._local_steps(ctx)
        ceiling: float = math.inf
        while True:
            tier, found = local.pop(0) if local else (None, None)
            floor = -1 if found is None else found.step
            candidates = newest_first(
                self.root,
                only_run=self._run_id.given,
                skipped=self._skipped,
                above=floor,
                up_to=ceiling,
                refuse_versions=True,
            )
            info = newest_sound(self.root, candidates, ctx, verify=verify, damaged=self._damaged)
            if info is None and tier is not None and found is not None:
                info = tier.open(found, ctx)
            if info is not None or tier is None:
                return info
            ceiling = floor

    def check_new(self, ctx: DistributedContext | None = None) -> None:
        """Check that the folder holds no checkpoints before a run starts from scratch. Collective.

        Call it if `newest` returned `None`, so that a run with damaged checkpoints does not restart silently.

        Raises:
            StateError: On every rank, if the main process sees a folder with the name of a checkpoint.
        """
        with failing_together(ctx, f"{self.root} cannot be read"):
            names: list[str] = []
            if is_main(ctx) and self.root.is_dir():
                names = sorted(path.name for path in self.root.iterdir() if step_of(path.name) >= 0)
            if isinstance(self.root, ObjectPath):  # a killed save has no manifest
                names = [name for name in names if (self.root / name / MANIFEST_NAME).exists()]
            if names:
                raise StateError(
                    f"{self.root} contains {', '.join(names)}, but none of them can be loaded; the log says why. "
                    "Repair them, or move them away to start from scratch."
                )

    def prepare(self, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Plan a save of `tensors` and allocate the host buffer of background saves. Collective.

        The first save is then as fast as later ones. A thread allocates the buffer, which is as large as the tensor
        data that this rank writes.

        Raises:
            StateError: On every rank, if the tensors cannot be saved.
            ValueError: In a single process, if a tensor cannot be saved. Also if `ctx` is missing although there are
                several ranks.
        """
        num_ranks(ctx)
        plan = self._planner.plan(tensors, ctx)
        self._background.group(ctx)
        self._staging.reserve(local_parts(tensors, plan, rank_of(ctx)))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue = None,
        rank_state: JsonValue = None,
        metric: float | None = None,
        background: bool = False,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Save a checkpoint, complete on disk when this returns; then delete old checkpoints. Collective.

        If the process is killed during the write, all earlier checkpoints stay intact. Only one save runs at a time:
        this method waits for the previous save.

        Args:
            step: Number of completed optimizer steps, greater than that of every undamaged checkpoint of the run.
            tensors: Plain tensors, and `DTensor`s, of which each shard is written once. The first rank that passes a
                tensor or shard writes it; values that differ on other ranks are lost. Ranks may pass different names,
                as pipeline stages do.
            state: State in JSON, equal on every rank; only the main process's value is written. Tuples are restored as
                lists.
            rank_state: State of this rank in JSON, such as its random state.
            metric: Quality of the model, for `Retention(best=...)`. A non-finite metric is not saved.
            background: True to copy this rank's tensor parts to host memory and write them in a thread. After this
                returns, the tensors may change, on an accelerator by work on the current stream: the host does not wait
                for the copies. An error in the thread is raised once, by the next call of `raise_if_failed`, `wait`,
                `close` or a save.
            ctx: Distributed context; `None` for a single process.

        Raises:
            UserError: If an undamaged checkpoint of this step, or one of a later step of the run, exists. Call
                `discard_after` to go back to an earlier step. Also if the step is not an int, 0 or more.
            ValueError: If a value is not a tensor or not JSON, or if `ctx` is missing although there are several ranks.
            StateError: On every rank, if writing failed on any rank, or a previous background save failed.
        """
        job = self._begin(step, tensors, state=state, rank_state=rank_state, metric=metric, ctx=ctx)
        parts = local_parts(tensors, job.plan, rank_of(ctx))
        if not background:
            write_checkpoint(job, parts)
            self._delete_old(job)
            return
        group = self._background.group(ctx)
        with failing_together(ctx, f"{job.folder} could not be copied to host memory", errors=Exception):
            copies, wait_copied = self._staging.copy(parts)

        def work() -> None:
            wait_copied()
            write_checkpoint(job, copies, group=group)
            self._delete_old(job)

        self._background.start(f"saving {job.folder}", work)

    def amend(
        self,
        step: int,
        entries: Mapping[str, JsonValue],
        *,
        metric: float | None = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Add results that were measured after a save to its checkpoint; then delete old checkpoints. Collective.

        The results are one more file, written atomically. A second call replaces those of the first one.

        Args:
            step: Step of a complete checkpoint of the run.
            entries: Entries that replace those of the shared state, which must be a JSON object.
            metric: Quality of the model, for `Retention(best=...)`. `None` or a non-finite one keeps that of `save`.
            ctx: Distributed context; `None` for a single process.

        Raises:
            UserError: On every rank, if the run has no complete checkpoint of the step.
            StateError: On every rank, if writing failed, or a previous background save failed.
        """
        self.wait()
        folder, value = self.root / folder_name(step), _finite(metric, step)
        with failing_together(ctx, f"{folder} could not be written"):
            if is_main(ctx):
                if next(self._of_run(above=step - 1, up_to=step), None) is None:
                    raise UserError(f"got step = {step}, but {self.root} has no complete checkpoint of it; save first.")
                body = with_digest({"entries": dict(entries), "metric": value})
                _files.replace_file(folder / AMENDMENT_NAME, body)
                self._apply_retention(self._run_id.current())

    def save_local(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue = None,
        rank_state: JsonValue = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Save to the local tiers that are due at this step, in the background. Collective.

        Arguments and errors are those of a background `save`. A tier keeps one step, until a newer step is complete on
        all hosts. Each tier waits only for its own previous save.

        Raises:
            UserError: If the job has too few hosts for the replicas of a tier, or the step is not an int, 0 or more.
        """
        folder_name(step)  # raises for a value that is not a step
        due = [tier for tier in self.tiers if step % tier.every == 0]
        run_id = self._run_id.written(ctx) if due else ""
        for tier in due:
            tier.save(step, tensors, run_id=run_id, state=state, rank_state=rank_state, ctx=ctx)

    def clear_tiers(self, ctx: DistributedContext | None = None) -> None:
        """Delete the local tiers on every host, when the run is complete. Collective."""
        for tier in self.tiers:
            tier.clear(ctx)

    def discard_after(self, step: int, ctx: DistributedContext | None = None) -> None:
        """Delete the checkpoints of all later steps, so that the run continues from `step`. Collective.

        Without this call, `save` does not save a step that is earlier than an undamaged checkpoint, because `newest`
        would return the later checkpoint. All digests of `step` are verified before the first deletion. Local tiers are
        cleared. Checkpoints of other runs are kept.

        Raises:
            UserError: On every rank, if the run has no undamaged checkpoint of `step`; then nothing is deleted. Also if
                the step is not an int, 0 or more.
            StateError: On every rank, if a checkpoint cannot be read or deleted.
        """
        folder_name(step)  # raises for a value that is not a step
        self.wait()
        chosen = self._of_run(above=step - 1, up_to=step)
        if newest_sound(self.root, chosen, ctx, verify=True, damaged=self._damaged) is None:
            raise UserError(
                f"{self.root} has no undamaged checkpoint of step {step} of this run; expected one to go back to. "
                "Nothing is deleted. Choose the step of another checkpoint."
            )
        with failing_together(ctx, f"the checkpoints after step {step} could not be deleted"):
            if is_main(ctx):
                for info in list(self._of_run(above=step)):  # newest first: a kill leaves those up to some step
                    delete(info.root)
        self.clear_tiers(ctx)

    def raise_if_failed(self) -> None:
        """Raise the `StateError` of a failed background save, once. Local and cheap: call it every step."""
        for each in self._threads:
            each.raise_if_failed()

    def wait(self) -> None:
        """Wait for the background saves; raise the `StateError` of the first one that was not raised yet."""
        self._join()
        self.raise_if_failed()

    def _join(self) -> None:
        for each in self._threads:
            each.join()

    def close(self) -> None:
        """Wait for the background save; same as `wait`. The store stays usable."""
        self.wait()

    def load(self, info: CheckpointInfo, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Load tensors from a checkpoint in place; the mesh may differ from the saved one. Collective.

        Unless `newest` verified them, all digests are verified before any tensor is changed, distributed over the
        ranks.

        Args:
            info: The checkpoint, equal on all ranks, from `newest(ctx)` or `complete()`.
            tensors: Tensors to load, with the saved global shapes and dtypes. May be a subset of the checkpoint.
            ctx: Distributed context; `None` for a single process.

        Raises:
            StateError: On every rank, if a file is damaged or unreadable, or a tensor in `tensors` is missing from the
                checkpoint or has another shape or dtype there.
            ValueError: If `ctx` is missing although there are several ranks.
        """
        num_ranks(ctx)
        agree(mismatches(info, tensors), error=StateError, alone=ctx is None)
        for tier in self.tiers:
            tier.fetch(info, tensors, ctx)
        # Verification is collective: if one rank's handle is unverified, all ranks verify.
        if not all(gather_json(info.is_verified, alone=ctx is None)):
            problems = verify_together(info, ctx)
            if problems is not None:
                raise StateError(f"{problems} Move {info.root} away to resume from the checkpoint before it.")
        with failing_together(ctx, f"{info.root} could not be read", errors=(OSError, ValueError, StateError)):
            load_tensors(info, tensors, threads=num_threads(ctx))
        for tier in self.tiers:
            tier.on_loaded(info)

    @contextmanager
    def locked(self, ctx: DistributedContext | None = None, *, wait_seconds: float = 0.0) -> Generator[None]:
        """Hold an exclusive lock on the folder for the body and background saves; see `locked_folder`. Collective.

        An object store has no locks: there, this method only waits for background saves at the end of the body.
        """
        root, run_id = self.root, None
        if isinstance(root, Path) and is_main(ctx):
            # The run id is used in messages only. If the folder is unreadable, `locked_folder` raises.
            with suppress(OSError, StateError):
                run_id = self._run_id.current()
        is_local = isinstance(root, Path)
        with locked_folder(root, ctx, run_id=run_id, wait_seconds=wait_seconds) if is_local else nullcontext() as lock:
            try:
                yield
            finally:
                try:
                    self._join()
                finally:
                    # If the wait was interrupted, the interpreter waits for the save at exit.
                    if lock is not None and self._background.is_busy:
                        lock.keep()

    def discard_partials(self, ctx: DistributedContext | None = None) -> None:
        """Delete partial folders of killed saves and deletions, when a job starts. Collective.

        In an object store, incomplete checkpoints that are newer than all complete checkpoints are kept. A save of the
        same step continues such a checkpoint. It is deleted after a newer checkpoint is complete.

        Raises:
            StateError: On every rank, if the main process cannot delete a partial folder.
        """
        self.wait()
        with failing_together(ctx):
            if is_main(ctx):
                discard_partials(self.root)

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
        """Wait for the previous save, encode the state, plan the tensors, and clear the final path. Collective."""
        state_text = rank_text = b""
        folder, run_id, problem = self.root, "", None
        is_alone = num_ranks(ctx) == 1
        try:
            self._background.wait()
            state_text, rank_text = dump_json(state), dump_json(rank_state)
            folder = self.root / folder_name(step)
            run_id = self._run_id.current() if is_main(ctx) else ""
        except (StateError, ValueError, OSError) as error:
            if is_alone:
                raise
            problem = describe(error)
        agree(problem, error=StateError, alone=ctx is None)
        plan = self._planner.plan(tensors, ctx)
        self._clear_path(folder, ctx)
        return SaveJob(
            folder=folder,
            run_id=run_id,
            step=step,
            metric=_finite(metric, step),
            mesh=mesh_shape(ctx),
            plan=plan,
            state=state_text,
            rank_state=rank_text,
            ctx=ctx,
        )

    def _clear_path(self, folder: AnyPath, ctx: DistributedContext | None) -> None:
        """Move a damaged checkpoint of the same step aside; raise `UserError` for an undamaged one. Collective.

        Also raises `UserError` if the run has an undamaged checkpoint of a later step.
        """
        step = step_of(folder.name)
        later: list[CheckpointInfo] = []
        with failing_together(ctx, f"{folder} cannot be read"):
            if is_main(ctx):
                later = [info for info in self._of_run(above=step) if info.root not in self._damaged]
                if not later:
                    self._clear_step(folder)
        if not gather_json(bool(later), alone=ctx is None)[0]:
            return
        found = newest_sound(self.root, iter(later), ctx, verify=True, damaged=self._damaged)
        if found is not None:
            raise UserError(
                f"got step = {step}, but {self.root} has a checkpoint of the later step {found.step}, from which a "
                "resume would continue. To go back to an earlier step N, call discard_after(N), which deletes the "
                "later ones; or save in another folder."
            )
        with failing_together(ctx, f"{folder} cannot be read"):
            if is_main(ctx):
                self._clear_step(folder)

    def _clear_step(self, folder: AnyPath) -> None:
        """Move a damaged checkpoint aside; raise `UserError` for an undamaged one. Main process only."""
        if not folder.exists():
            return
        try:
            if folder in self._damaged:
                raise StateError("a rank reported this checkpoint as damaged.")
            open_complete(folder).verify()
        except UnreadableError:
            raise
        except StateError as reason:
            move_aside(folder, reason)
            return
        raise UserError(f"{folder} exists and is complete; checkpoints are never overwritten. Save a different step.")

    def _of_run(self, *, above: int, up_to: float = math.inf) -> Iterator[CheckpointInfo]:
        """Iterate over the complete checkpoints of the store's run, newest first. Main process only; lazy."""
        yield from newest_first(self.root, only_run=self._run_id.current(), above=above, up_to=up_to)

    def _delete_old(self, job: SaveJob) -> None:
        if not is_main(job.ctx):
            return
        if isinstance(self.root, ObjectPath):
            try:
                discard_incomplete(self.root)
            except StateError as error:
                _LOGGER.warning("%s", error)
        self._apply_retention(job.run_id)

    def _apply_retention(self, run_id: str) -> None:
        """Delete the checkpoints that the retention policy does not keep. Main process only."""
        if self._retention.last is not None:
            delete_old(self.root, self._retention, run_id=run_id, damaged=self._damaged)

    def _local_steps(self, ctx: DistributedContext | None) -> list[tuple[LocalTier, TierStep]]:
        """Return the complete steps of the local tiers, newest first, then fastest tier first. Collective."""
        run_id = self._run_id.shared_known(ctx) if self.tiers else None
        if run_id is None:
            return []
        found = [(tier, step) for tier in self.tiers for step in tier.steps(run_id, ctx)]
        return sorted(found, key=lambda pair: -pair[1].step)


def _finite(metric: float | None, step: int) -> float | None:
    """Return the metric of a step as a float; `None`, with a warning, if it is not finite."""
    if metric is not None and not math.isfinite(metric):
        _LOGGER.warning("the metric of step %d is %s; the checkpoint is saved without a metric", step, metric)
        return None
    return None if metric is None else float(metric)
