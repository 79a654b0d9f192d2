"""The folder of a job's checkpoints: which one is the newest that can be trusted, and how the next one gets there."""

import logging
import uuid
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._consensus import agree, broadcast_int, is_main, num_ranks
from d9d_state.checkpoint._storage import CheckpointReader, CheckpointWriter, SaveJob
from d9d_state.checkpoint.info import CheckpointInfo, folder_name, open_complete, step_of
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.tensor_info import TensorInfo

_LOGGER = logging.getLogger("d9d.state")


@final
class CheckpointStore:
    """The checkpoints of one run in one folder, one immutable sub-folder `step-00000100` for each step that was saved.

    A sub-folder appears under that name only when every byte of it is on the disk, and is never changed afterwards.

    Attributes:
        folder: Where they are. Nothing is created before the first save.
    """

    def __init__(self, folder: str | Path, *, keep_last: int | None = None, run_id: str | None = None) -> None:
        """Name the folder; it is not touched.

        Args:
            folder: Where the checkpoints are or will be.
            keep_last: How many to keep; older ones are deleted after a save. `None` keeps all.
            run_id: Which run it is. `None` goes on with the run that the newest checkpoint is of, or starts one.

        Raises:
            ValueError: If `keep_last` is less than 1.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"got keep_last = {keep_last}; expected at least 1, or None to keep every checkpoint.")
        self.folder = Path(folder).absolute()
        self._keep_last = keep_last
        self._run_id = run_id

    def complete(self) -> list[CheckpointInfo]:
        """Every complete checkpoint, newest first. What else lies in the folder is skipped, and the log says why.

        Complete means that the manifest is sound and each file has the size that it says. Digests are compared when
        something is loaded, or by `verify`. Needs no process group.
        """
        return list(self._newest_first(log_level=logging.WARNING))

    def newest(self, ctx: DistributedContext | None = None) -> CheckpointInfo | None:
        """The complete checkpoint of the highest step, or `None` if there is none.

        Args:
            ctx: With several ranks the choice is the main process's, and collective; `None` looks for itself.

        Raises:
            StateError: On every rank, if a rank cannot see what the main process chose.
        """
        if ctx is None or ctx.world_size == 1:
            return next(self._newest_first(log_level=logging.WARNING), None)
        chosen = next(self._newest_first(log_level=logging.WARNING), None) if ctx.is_main_process else None
        step = broadcast_int(-1 if chosen is None else chosen.step, ctx)
        if step < 0:
            return None
        problem = None
        try:
            chosen = open_complete(self.folder / folder_name(step))
        except StateError as error:
            problem = f"{self.folder / folder_name(step)} is not what the main process sees: {error}"
        agree(problem, ctx)
        return chosen

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        state: JsonValue = None,
        rank_state: JsonValue = None,
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
            ctx: The ranks; `None` for a process on its own.

        Raises:
            UserError: If there is a complete checkpoint of that step already.
            ValueError: If something is no tensor or no JSON; if `ctx` is missing on several ranks.
            StateError: On every rank, if writing failed on one.
        """
        ranks = num_ranks(ctx)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is of type {type(tensor).__name__}; expected a tensor. Put it into state.")
        texts = dump_json(state), dump_json(rank_state)
        folder = self.folder / folder_name(step)
        self._prepare(folder, ctx)
        job = SaveJob(
            partial=_partial(folder),
            folder=folder,
            run_id=self._current_run_id() if is_main(ctx) else "",
            step=step,
            mesh=_mesh_shape(ctx),
            rank=0 if ctx is None else ctx.rank,
            num_ranks=ranks,
            state=texts[0],
            rank_state=texts[1],
        )
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _as_state_errors(f"{folder} could not be written"):
            dcp.save(dict(tensors), storage_writer=CheckpointWriter(job), planner=planner, no_dist=ranks == 1)
        if is_main(ctx):
            self._delete_old(step)

    def load(self, info: CheckpointInfo, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Fill tensors from a checkpoint, in place, whatever mesh it was saved on. Collective.

        The digests of all files are verified, shared out over the ranks, before a value is written.

        Args:
            info: The same checkpoint on each rank, from `newest(ctx)`.
            tensors: What to fill, with the global shapes and the dtypes that were saved. May be a part of what the
                checkpoint holds.
            ctx: The ranks; `None` for a process on its own.

        Raises:
            StateError: On every rank, if a file is damaged, or a tensor is missing or of another shape or dtype.
            ValueError: If `ctx` is missing on several ranks.
        """
        ranks = num_ranks(ctx)
        rank = 0 if ctx is None else ctx.rank
        problem = _misfits(info, tensors)
        try:
            info.verify(sorted(info.manifest.files)[rank::ranks])
        except StateError as error:
            problem = str(error)
        agree(problem, ctx)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = CheckpointReader(info.folder, info.manifest)
        with _as_state_errors(f"{info.folder} could not be read"):
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=ranks == 1)

    def discard_partials(self, ctx: DistributedContext | None = None) -> None:
        """Delete what killed saves and killed deletions left. The main process does it; call it when a job starts."""
        if is_main(ctx) and self.folder.is_dir():
            for path in sorted(self.folder.glob("step-*.partial")):
                if step_of(path.stem) >= 0 and path.is_dir() and not path.is_symlink():
                    _LOGGER.info("deleting %s, which was never completed", path)
                    _files.remove_folder(path)

    def _prepare(self, folder: Path, ctx: DistributedContext | None) -> None:
        """Make room for a new partial folder, on the main process, and tell the others whether that worked."""
        problem = None
        if is_main(ctx):
            try:
                self._make_partial(folder)
            except OSError as error:
                problem = f"{folder} could not be made: {error}"
        exists = broadcast_int(int(problem is None and folder.exists()), ctx)
        agree(problem, ctx)
        if exists:
            raise UserError(f"{folder} is complete already, and checkpoints are never overwritten; save another step.")

    def _make_partial(self, folder: Path) -> None:
        partial = _partial(folder)
        if folder.exists():
            try:
                open_complete(folder)
            except StateError as reason:
                aside = _unused_name(folder)
                _LOGGER.warning("moving %s to %s: %s", folder, aside, reason)
                _files.rename(folder, aside)
            else:
                return
        if partial.is_dir():
            _files.remove_folder(partial)
        _files.make_folder(partial)

    def _delete_old(self, saved_step: int) -> None:
        """Delete what `keep_last` does not keep; never what was just saved. A failure to delete stops nobody."""
        if self._keep_last is None:
            return
        older = [info for info in self._newest_first() if info.step != saved_step]
        for info in older[self._keep_last - 1 :]:
            try:
                # Under this name a deletion that is killed half-way cannot leave a torn checkpoint.
                _files.rename(info.folder, _partial(info.folder))
                _files.remove_folder(_partial(info.folder))
            except OSError as error:
                _LOGGER.warning("%s could not be deleted: %s", info.folder, error)

    def _current_run_id(self) -> str:
        if self._run_id is None:
            newest = next(self._newest_first(), None)
            self._run_id = uuid.uuid4().hex if newest is None else newest.manifest.run_id
        return self._run_id

    def _newest_first(self, *, log_level: int = logging.DEBUG) -> Iterator[CheckpointInfo]:
        if not self.folder.is_dir():
            return
        paths = sorted(self.folder.iterdir())
        foreign = [path for path in paths if step_of(path.name) < 0]
        ours = [path for path in paths if step_of(path.name) >= 0]
        for path in [*foreign, *sorted(ours, key=lambda path: step_of(path.name), reverse=True)]:
            try:
                yield open_complete(path)
            except StateError as reason:
                _LOGGER.log(log_level, "skipping %s: %s", path, reason)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _unused_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _mesh_shape(ctx: DistributedContext | None) -> dict[str, int]:
    if ctx is None:
        return {}
    mesh = ctx.mesh_for("regular")
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _misfits(info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> str | None:
    """What the checkpoint cannot fill; `None` if it can fill everything."""
    saved = info.tensors
    problems = [f"{name} is not in it" for name in tensors if name not in saved]
    for name, tensor in tensors.items():
        wanted = TensorInfo.of(tensor)
        if name in saved and saved[name] != wanted:
            problems.append(f"{name} is {saved[name].describe()}, expected {wanted.describe()}")
    return f"{info.folder} does not fit: {'; '.join(problems)}." if problems else None


@contextmanager
def _as_state_errors(what: str) -> Generator[None]:
    """Turn what torch raises, which is no `Exception`, into ours; and do not warn that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
            raise StateError(f"{what}: {causes}") from error
        except OSError as error:
            raise StateError(f"{what}: {error}") from error
