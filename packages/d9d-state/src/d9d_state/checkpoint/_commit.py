"""Commit of a checkpoint: every rank writes its files, then the main process writes the manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext, agree, gather_json
from d9d_state import _files
from d9d_state._digests import PartRecord
from d9d_state._member import AnyPath
from d9d_state._partial_folder import check_sizes, discard_partial, make_partial, partial_path
from d9d_state._ranks import is_main
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
from d9d_state.object_path import ObjectPath
from d9d_state.safetensors_file import SafetensorsRecord, write_safetensors


@final
@dataclass(frozen=True, slots=True)
class SaveJob:
    """Content of one save, except the tensor data. Only the main process's `run_id` and `state` are written."""

    folder: AnyPath
    run_id: str
    step: int
    metric: float | None
    mesh: Mapping[str, int]
    plan: SavePlan
    state: bytes
    rank_state: bytes
    ctx: DistributedContext | None

    @property
    def partial(self) -> AnyPath:
        """Path under which the files are written; a partial folder is renamed to `folder` at the end."""
        return partial_path(self.folder)

    @property
    def rank(self) -> int:
        """Rank of this process; 0 without a context."""
        return 0 if self.ctx is None else self.ctx.rank


def write_checkpoint(job: SaveJob, parts: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's files and commit the checkpoint, which is complete on disk when this returns. Collective.

    `parts` must not change before this returns. `group` is a Gloo group for use in a background thread. Raises
    `StateError` on every rank if writing failed on any rank.
    """
    failed = f"{job.folder} could not be written"
    problem = None
    make_partial(job.folder, job.ctx, group=group)
    records: JsonValue = None
    try:
        records = _write_own(job, parts)
    except Exception as error:  # any error: the other ranks wait in agree()
        problem = f"{failed}: {describe(error)}"
    _agree_or_discard(problem, job, group)
    written = gather_json(records, group, alone=job.ctx is None)
    try:
        if is_main(job.ctx):
            _commit(job, written)
    except (OSError, ValueError, StateError) as error:
        problem = f"{failed}: {describe(error)}"
    _agree_or_discard(problem, job, group)


def _agree_or_discard(problem: str | None, job: SaveJob, group: dist.ProcessGroup | None) -> None:
    """Delete the partial folder and raise `StateError` if any rank reports a problem. Collective.

    Deletion frees space if the disk is full.
    """
    try:
        agree(problem, group, error=StateError, alone=job.ctx is None)
    except StateError as failed:
        if is_main(job.ctx):
            try:
                discard_partial(job.partial)
            except (OSError, StateError) as error:
                raise StateError(f"{failed}; and {job.partial} could not be removed: {error}") from error
        raise


def _write_own(job: SaveJob, parts: Mapping[str, Tensor]) -> JsonValue:
    """Write and fsync this rank's files; return their sizes and digests as JSON."""
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
    """Write the manifest and rename the partial folder, which completes the checkpoint."""
    (state,) = _files.write_file(job.partial / STATE_NAME, [job.state])
    files = {STATE_NAME: FileRecord(state.size, state)}
    chunks: dict[str, list[Chunk]] = {name: [] for name in job.plan.tensors}
    for rank, of_rank in enumerate(written):
        header, rank_state = PartRecord(*of_rank["header"]), PartRecord(*of_rank["rank_state"])
        parts = {key: PartRecord(*of_rank["tensors"][key]) for key in of_rank["order"]}
        of_file, size = chunks_of_rank(job.plan, rank, SafetensorsRecord(header, parts))
        for name, chunk in of_file:
            chunks[name].append(chunk)
        files[tensors_name(rank)] = FileRecord(size, header)
        files[rank_state_name(rank)] = FileRecord(rank_state.size, rank_state)
    tensors = {name: TensorRecord(info, tuple(chunks[name])) for name, info in job.plan.tensors.items()}
    manifest = Manifest(job.run_id, job.step, job.metric, job.mesh, len(written), tensors, files)
    text = manifest.dump()
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"its manifest has {len(text)} bytes; expected at most {MAX_MANIFEST_BYTES}. "
            "Save fewer, larger tensors, or shard them over fewer ranks."
        )
    check_sizes(job.partial, {name: record.size for name, record in files.items()})
    if isinstance(job.partial, ObjectPath):
        for name in job.partial.sizes().keys() - files.keys():  # files left by a killed save with more ranks
            (job.partial / name).remove()
    _files.write_file(job.partial / MANIFEST_NAME, [text])
    _files.fsync_folder(job.partial)
    if isinstance(job.partial, Path) and isinstance(job.folder, Path):
        _files.rename(job.partial, job.folder)
        _files.fsync_folder(job.folder.parent)


def chunks_of_rank(plan: SavePlan, rank: int, written: SafetensorsRecord) -> tuple[list[tuple[str, Chunk]], int]:
    """Return the chunks in a rank's tensor file, each with the name of its tensor, and the size of the file."""
    file, position = tensors_name(rank), written.header.size
    places: dict[str, tuple[int, str]] = {}
    for key, record in written.tensors.items():
        places[key] = position, record.digest
        position += record.size
    chunks = [(name, Chunk(region, file, *places[part_key(name, region)])) for name, region in plan.parts[rank]]
    return chunks, position


def _pair(record: PartRecord) -> JsonValue:
    return [record.size, record.digest]
