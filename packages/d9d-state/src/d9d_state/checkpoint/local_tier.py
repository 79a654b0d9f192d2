"""Local tier: checkpoints in a folder of each host, in memory or on a local disk, with replicas on other hosts."""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, final

from torch import Tensor

from d9d_dist import DistributedContext, UserError, gather_json
from d9d_state import _files
from d9d_state._ranks import failing_together, mesh_shape, num_ranks, rank_of
from d9d_state.checkpoint._background import Background, Staging
from d9d_state.checkpoint._commit import SaveJob
from d9d_state.checkpoint._hosts import Hosts
from d9d_state.checkpoint._tier_search import OpenStep, TierReader, TierStep
from d9d_state.checkpoint._tier_writer import TierWriter
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.save_plan import SavePlanner, local_parts
from d9d_state.json_value import JsonValue, dump_json


@final
class LocalTier:
    """Store of a run's last checkpoint in a local folder of each host, with replicas of each part on other hosts.

    A folder in `/dev/shm` is host memory that survives the processes of the job; a folder on a disk also survives a
    reboot. Pass the tier to `CheckpointStore`, which saves to the tier and loads from it. The digests are of the same
    type as in the store's checkpoints.

    The replicas are on the next hosts in a ring over all hosts. `background` is the thread of the saves.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, replicas: int = 1) -> None:
        """Create the tier without accessing the folder.

        Args:
            folder: Folder, such as `/dev/shm/my-run`, which need not exist. Each host has a separate folder at this
                path, which its ranks share. No other run may use it.
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
        self.background = Background()
        self._planner, self._staging = SavePlanner(), Staging()
        self._reader: TierReader | None = None
        self._writer: TierWriter | None = None
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
        self.background.wait()
        reader, writer = self._connect(ctx)
        plan = self._planner.plan(tensors, ctx)
        state_text = rank_text = b""
        copies: dict[str, Tensor] = {}
        try:
            state_text, rank_text = dump_json(state), dump_json(rank_state)
            if not self._is_settled:
                kept = None if self._open is None else self._open.found
                writer.slot = reader.forget_other_steps(kept, since=self._resumed_from)
            copies, wait_copied = self._staging.copy(local_parts(tensors, plan, rank_of(ctx)))
            self._is_settled = True
        except Exception as error:  # any error: the background save reports it to the other ranks
            wait_copied = partial(_raise, error)
            self._is_settled = False
        job = SaveJob(
            folder=self.folder,
            run_id=run_id,
            step=step,
            metric=None,
            mesh=mesh_shape(ctx),
            plan=plan,
            state=state_text,
            rank_state=rank_text,
            ctx=ctx,
        )
        self.background.start(f"saving step {step} in {self.folder}", lambda: writer.write(job, copies, wait_copied))

    def connect(self, ctx: DistributedContext | None = None) -> None:
        """Find the hosts of the job before it starts. Collective on the first call; other methods call it too.

        Raises:
            UserError: On every rank, if the job has too few hosts for `replicas`.
        """
        self._connect(ctx)

    def steps(self, run_id: str, ctx: DistributedContext | None = None) -> list[TierStep]:
        """Return the complete steps of a run over all hosts, newest first. Collective."""
        self.background.wait()
        return self._connect(ctx)[0].steps(run_id)

    def open(self, found: TierStep, ctx: DistributedContext | None = None) -> CheckpointInfo | None:
        """Verify every part of a step on one of the hosts that have it. Collective.

        Returns the checkpoint, with the small files of all ranks on every host; `None` if a part is damaged on all
        hosts. Raises `StateError` on every rank if a host cannot write the small files of the other hosts.
        """
        self._open = self._connect(ctx)[0].open(found)
        return None if self._open is None else self._open.info

    def fetch(self, info: CheckpointInfo, tensors: Mapping[str, Tensor], ctx: DistributedContext | None = None) -> None:
        """Copy the files that this host needs for `tensors` from other hosts. Collective.

        Does nothing if `info` is not the open step of this tier.
        """
        if self._open is not None and self._open.info.root == info.root:
            self._connect(ctx)[0].fetch(self._open, tensors)

    def on_loaded(self, info: CheckpointInfo) -> None:
        """Record the step that the job continues from: later steps in the tier are deleted by the next save."""
        self._resumed_from, self._is_settled = info.step, False
        if self._open is not None and self._open.info.root != info.root:
            self._open = None

    def clear(self, ctx: DistributedContext | None = None) -> None:
        """Delete the folder on every host, to free the memory or disk when a run is complete. Collective."""
        self.background.wait()
        reader, _ = self._connect(ctx)
        self._reader, self._writer, self._open = None, None, None
        with failing_together(ctx, f"{self.folder} could not be deleted"):
            if reader.is_leader:
                _files.remove_folder(self.folder)

    def _connect(self, ctx: DistributedContext | None) -> tuple[TierReader, TierWriter]:
        """Find the hosts, and return this rank's reader and writer. Collective on the first call."""
        num_ranks(ctx)
        if self._reader is None or self._writer is None or self._reader.ctx is not ctx:
            group = self.background.group(ctx)
            hosts = Hosts.find(self.folder, ctx, group)
            if self.replicas >= len(hosts):
                if hosts.is_new:
                    with suppress(OSError):  # another job may use it
                        self.folder.rmdir()
                found = f"{len(hosts)} folder" + ("s" if len(hosts) > 1 else "")
                raise UserError(
                    f"got replicas = {self.replicas} for {self.folder}, but the ranks of the job have only {found} of "
                    "this path; expected one folder per host, and more folders than replicas. Set replicas to "
                    f"{len(hosts) - 1}, or use a folder that hosts do not share."
                )
            life = str(gather_json(uuid.uuid4().hex, group, alone=ctx is None)[0])
            self._reader = TierReader(self.folder, hosts, ctx, group)
            self._writer = TierWriter(self.folder, hosts, replicas=self.replicas, life=life, ctx=ctx, group=group)
        return self._reader, self._writer


def _raise(error: Exception) -> NoReturn:
    raise error
