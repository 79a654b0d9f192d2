"""How a checkpoint gets to the disk: every rank writes its files, and the main process makes them a checkpoint.

The same steps serve a save that training waits for and one in a thread beside it; only the group of the ranks differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext
from d9d_state import _files
from d9d_state._consensus import agree, exchange_json, is_main
from d9d_state._digests import PartRecord
from d9d_state._partial_folder import check_sizes, discard_partial, make_partial, partial_of
from d9d_state.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    STATE_NAME,
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    rank_state_name,
    tensors_name,
)
from d9d_state.checkpoint.save_plan import SavePlan, part_key
from d9d_state.errors import StateError, describe
from d9d_state.json_value import JsonValue
from d9d_state.safetensors_file import write_safetensors


@final
@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that one checkpoint holds besides tensors.

    Attributes:
        folder: The name that it gets.
        run_id: Which run it is; the main process's counts.
        step: Number of optimizer steps that were done.
        metric: How good the model is, if somebody said.
        mesh: Size of every mesh axis.
        plan: Who writes what.
        state: Canonical JSON; the main process's counts.
        rank_state: Canonical JSON of this rank.
        ctx: The ranks; `None` for this process alone.
    """

    folder: Path
    run_id: str
    step: int
    metric: float | None
    mesh: Mapping[str, int]
    plan: SavePlan
    state: bytes
    rank_state: bytes
    ctx: DistributedContext | None

    @property
    def partial(self) -> Path:
        """The folder that is written to, until it gets its name."""
        return partial_of(self.folder)

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self.ctx is None else self.ctx.rank


def write_checkpoint(job: SaveJob, parts: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part; when this returns the checkpoint is complete on the disk. Collective.

    Args:
        job: What to write.
        parts: This rank's parts of tensors, which do not change before this returns.
        group: A group of all ranks on the CPU, in a thread; `None` for the default group.

    Raises:
        StateError: On every rank, if writing failed on one.
    """
    failed = f"{job.folder} could not be written"
    problem = None
    make_partial(job.folder, job.ctx, group=group)
    records: JsonValue = None
    try:
        records = _write_own(job, parts)
    except Exception as error:  # whatever it is, the others wait for the agreement
        problem = f"{failed}: {describe(error)}"
    _agree_or_discard(problem, job, group)
    written = exchange_json(records, job.ctx, group=group)
    try:
        if is_main(job.ctx):
            _commit(job, written)
    except (OSError, ValueError) as error:
        problem = f"{failed}: {describe(error)}"
    _agree_or_discard(problem, job, group)


def _agree_or_discard(problem: str | None, job: SaveJob, group: dist.ProcessGroup | None) -> None:
    """Go on, or give the disk back what was written: it may be full."""
    try:
        agree(problem, job.ctx, group=group)
    except StateError:
        if is_main(job.ctx):
            try:
                discard_partial(job.partial)
            except OSError as error:
                raise StateError(f"{problem}; and {job.partial} could not be removed: {error}") from error
        raise


def _write_own(job: SaveJob, parts: Mapping[str, Tensor]) -> JsonValue:
    """Write this rank's files and bring them to the disk; give their sizes and digests."""
    tensors = write_safetensors(job.partial / tensors_name(job.rank), parts)
    (rank_state,) = _files.write_file(job.partial / rank_state_name(job.rank), [job.rank_state])
    _files.fsync_folder(job.partial)
    return {
        "header": _pair(tensors.header),
        "tensors": {name: _pair(record) for name, record in tensors.tensors.items()},
        "order": list(tensors.tensors),
        "rank_state": _pair(rank_state),
    }


def _commit(job: SaveJob, written: list[Any]) -> None:
    """Write the manifest last, and give the folder its name: from here on it is a checkpoint."""
    (state,) = _files.write_file(job.partial / STATE_NAME, [job.state])
    files = {STATE_NAME: FileRecord(state.size, state)}
    chunks: dict[str, list[Chunk]] = {name: [] for name in job.plan.tensors}
    for rank, of_rank in enumerate(written):
        file, position = tensors_name(rank), of_rank["header"][0]
        places: dict[str, tuple[int, str]] = {}
        for key in of_rank["order"]:
            size, digest = of_rank["tensors"][key]
            places[key] = position, digest
            position += size
        for name, box in job.plan.parts[rank]:
            chunks[name].append(Chunk(box, file, *places[part_key(name, box)]))
        files[file] = FileRecord(position, PartRecord(*of_rank["header"]))
        rank_state = PartRecord(*of_rank["rank_state"])
        files[rank_state_name(rank)] = FileRecord(rank_state.size, rank_state)
    tensors = {name: TensorRecord(info, tuple(chunks[name])) for name, info in job.plan.tensors.items()}
    manifest = Manifest(job.run_id, job.step, job.metric, job.mesh, len(written), tensors, files)
    text = manifest.dump()
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"its manifest would have {len(text)} bytes, more than the {MAX_MANIFEST_BYTES} that are read; "
            "save fewer, larger tensors, or shard them over fewer ranks."
        )
    check_sizes(job.partial, {name: record.size for name, record in files.items()})
    _files.write_file(job.partial / MANIFEST_NAME, [text])
    _files.fsync_folder(job.partial)
    _files.rename(job.partial, job.folder)
    _files.fsync_folder(job.folder.parent)


def _pair(record: PartRecord) -> JsonValue:
    return [record.size, record.sha256]
