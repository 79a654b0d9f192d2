"""Local tier: checkpoints in a folder of each host, in memory or on a local disk, with replicas on other hosts."""

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_state import _files
from d9d_state._ranks import mesh_shape, num_ranks
from d9d_state.checkpoint._background import Background
from d9d_state.checkpoint._hosts import Hosts
from d9d_state.checkpoint._staging import Staging
from d9d_state.checkpoint._tier_search import OpenStep, TierReader, TierStep
from d9d_state.checkpoint._tier_writer import TierSave, TierWriter
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.save_plan import SavePlanner, local_parts
from d9d_state.errors import StateError, describe
from d9d_state.json_value import JsonValue, dump_json

_LOGGER = logging.getLogger("d9d.state")


@final
class LocalTier:
    """Store of a run's last checkpoint in a local folder of each host, with replicas of each part on other hosts.

    A folder in `/dev/shm` is host memory that survives the processes of the job; a folder on a disk also survives a
    reboot. Pass the tier to `CheckpointStore`, which saves to the tier and loads from it. The digests are of the same
    type as in the store's checkpoints.

    Attributes:
        folder: Path of the tier's folder. Each host has a separate folder at this path, which its ranks share.
        every: Number of steps between saves.
        replicas: Number of other hosts that keep a copy of each rank's part: the next hosts in a ring over all hosts.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, replicas: int = 1) -> None:
        """Create the tier without accessing the folder.

        Args:
            folder: Folder on each host, such as `/dev/shm/my-run`, which need not exist. No other run may use it.
            every: Number of steps between saves.
            replicas: Number of other hosts that keep a copy of each rank's part. With 0, the step is lost if a host
                fails.

        Raises:
            UserError: If `every` is less than 1, or `replicas` is negative.
        """
        if every < 1:
            raise UserError(f"got every = {every}; expected at least 1 step.")
        if replicas < 0:
            raise UserError(f"got replicas = {replicas}; expected 0 or more other hosts.")
        self.folder, self.every, self.replicas = Path(folder).absolute(), every, replicas
        self._planner, self._staging, self._background = SavePlanner(), Staging(), Background()
        self._ctx: DistributedContext | None = None
        self._hosts: Hosts | None = None
        self._writer: TierWriter | None = None
        self._life = ""
        self._open: OpenStep | None = None
        self._resumed_from = -1
        self._is_settled = False

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of tensor data that this rank has sent to other hosts in saves."""
        return 0 if self._writer is None else self._writer.num_bytes_sent

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        run_id: str,
        state: JsonValue = None,
        rank_state: JsonValue = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        """Save a step in the background, after waiting for the previous save of this tier. Collective.

        Arguments and guarantees are those of a background save of `CheckpointStore`. `run_id` is the run id of the main
        process.

        Raises:
            UserError: If the job has too few hosts for `replicas`.
            StateError: On every rank, if the previous save failed, or the tensors cannot be saved.
        """
        self._background.wait()
        group = self._connect(ctx)
        rank, plan = 0 if ctx is None else ctx.rank, self._planner.plan(tensors, ctx)
        writer = self._writer_of(rank, group)
        problem, texts, copies = None, (b"", b""), {}
        wait_copied: Callable[[], None] = lambda: None  # noqa: E731 - replaced unless the copy fails
        try:
            texts = dump_json(state), dump_json(rank_state)
            if not self._is_settled:
                kept = None if self._open is None else self._open.found
                writer.overwrite(self._reader(ctx, group).forget_other_steps(kept, since=self._resumed_from))
            copies, wait_copied = self._staging.copy(local_parts(tensors, plan, rank), plan, rank)
        except Exception as error:  # any error: the background save reports it to the other ranks
            problem = f"step {step} could not be copied to host memory: {describe(error)}"
        self._is_settled = problem is None
        save = TierSave(f"{self._life}-{step}", run_id, step, mesh_shape(ctx), plan, *texts)
        self._background.start(
            f"saving step {step} in {self.folder}", lambda: writer.write(save, copies, wait_copied, problem)
        )

    def steps(self, run_id: str, ctx: DistributedContext | None = None) -> list[TierStep]:
        """Return the complete steps of a run over all hosts, newest first. Collective."""
        self._background.wait()
        return self._reader(ctx, self._connect(ctx)).steps(run_id)

    def open(self, found: TierStep, ctx: DistributedContext | None = None) -> CheckpointInfo | None:
        """Verify every part of a step on one of the hosts that have it. Collective.

        Returns:
            The checkpoint, with the small files of all ranks on every host; `None` if a part is damaged on all hosts.

        Raises:
            StateError: On every rank, if a host cannot write the small files of the other hosts.
        """
        self._open = self._reader(ctx, self._connect(ctx)).open(found)
        return None if self._open is None else self._open.info

    def fetch(self, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> int:
        """Copy the files of the open step that this host needs for `tensors` from other hosts. Collective.

        Returns the number of received bytes.
        """
        assert self._open is not None, "expected an open step"
        return self._reader(ctx, self._connect(ctx)).fetch(self._open, tensors)

    def on_loaded(self, info: CheckpointInfo) -> None:
        """Record the step that the job continues from: later steps in the tier are deleted by the next save."""
        self._resumed_from, self._is_settled = info.step, False
        if not self.has_open(info):
            self._open = None

    def has_open(self, info: CheckpointInfo) -> bool:
        """Return True if a checkpoint is the open step of this tier."""
        return self._open is not None and self._open.info.root == info.root

    def raise_if_failed(self) -> None:
        """Raise the `StateError` of a failed save, once. Local and cheap."""
        self._background.raise_if_failed()

    def join(self) -> None:
        """Wait for the save without raising its error."""
        self._background.join()

    def clear(self, ctx: DistributedContext | None = None) -> None:
        """Delete the folder on every host, to free the memory or disk when a run is complete. Collective."""
        self._background.wait()
        self._connect(ctx)
        assert self._hosts is not None
        rank, problem = 0 if ctx is None else ctx.rank, None
        try:
            if self._hosts.ranks[self._hosts.of(rank)][0] == rank:
                _files.remove_folder(self.folder)
        except OSError as error:
            problem = f"{self.folder} could not be deleted: {describe(error)}"
        self._writer, self._open = None, None
        agree(problem, error=StateError, alone=ctx is None)

    def _connect(self, ctx: DistributedContext | None) -> dist.ProcessGroup | None:
        """Find the hosts, and return the tier's process group. Collective on the first call."""
        num_ranks(ctx)
        group = self._background.group(ctx)
        if self._hosts is None or ctx is not self._ctx:
            self._hosts = Hosts.find(self.folder, ctx, group)
            self._life = str(gather_json(uuid.uuid4().hex, group, alone=group is None)[0])
            self._ctx, self._writer = ctx, None
            if self.replicas >= len(self._hosts):
                found = f"{len(self._hosts)} folder" + ("s" if len(self._hosts) > 1 else "")
                raise UserError(
                    f"got replicas = {self.replicas} for {self.folder}, but the ranks of the job have only {found} of "
                    "this path; expected one folder per host, and more folders than replicas. Set replicas to "
                    f"{len(self._hosts) - 1}, or use a folder that hosts do not share."
                )
        return group

    def _reader(self, ctx: DistributedContext | None, group: dist.ProcessGroup | None) -> TierReader:
        assert self._hosts is not None
        return TierReader(self.folder, self._hosts, ctx, group)

    def _writer_of(self, rank: int, group: dist.ProcessGroup | None) -> TierWriter:
        if self._writer is None:
            assert self._hosts is not None
            self._writer = TierWriter(self.folder, rank=rank, hosts=self._hosts, replicas=self.replicas, group=group)
        return self._writer
