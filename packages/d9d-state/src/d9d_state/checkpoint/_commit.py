"""Commit of a checkpoint: every rank writes its files, then the main process writes the manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext, gather_json
from d9d_state import _files
from d9d_state._digests import PartRecord
from d9d_state._member import AnyPath
from d9d_state._partial_folder import check_sizes, discard_partial, make_partial, partial_path
from d9d_state._ranks import failing_together, is_main, rank_of
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
from d9d_state.errors import StateError, as_state_error
from d9d_state.json_value import JsonValue
from d9d_state.object_path import ObjectPath
from d9d_state.safetensors_file import SafetensorsRecord, write_safetensors


@final
@dataclass(frozen=True, slots=True, kw_only=True)
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


def write_checkpoint(job: SaveJob, parts: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's files and commit the checkpoint, which is complete on disk when this returns. Collective.

    `parts` must not change before this returns. `group` is a Gloo group for use in a background thread. Raises
    `StateError` on every rank if writing failed on any rank.
    """
    make_partial(job.folder, job.ctx, group=group)
    failed = f"{job.folder} could not be written"
    records: JsonValue = None
    try:
        with failing_together(job.ctx, failed, errors=Exception, group=group):
            records = _write_own(job, parts)
        written = gather_json(records, group, alone=job.ctx is None)
        with failing_together(job.ctx, failed, errors=Exception, group=group):
            if is_main(job.ctx):
                _commit(job, written)
    except StateError as problem:
        if is_main(job.ctx):
            with as_state_error(f"{problem}; and {job.partial} could not be removed"):
                discard_partial(job.partial)  # frees space if the disk is full
        raise


def _write_own(job: SaveJob, parts: Mapping[str, Tensor]) -> JsonValue:
    """Write and fsync this rank's files; return their sizes and digests as JSON."""
    rank = rank_of(job.ctx)
    tensors = write_safetensors(job.partial / tensors_name(rank), parts)
    (rank_state,) = _files.write_file(job.partial / rank_state_name(rank), [job.rank_state])
    _files.fsync(job.partial)
    return [tensors.header, tensors.tensors, rank_state]


def _commit(job: SaveJob, written: list[Any]) -> None:
    """Write the manifest and rename the partial folder, which completes the checkpoint."""
    (state,) = _files.write_file(job.partial / STATE_NAME, [job.state])
    shares: list[Manifest] = []
    for rank, (header, parts, rank_state) in enumerate(written):
        tensors = SafetensorsRecord(PartRecord(*header), {key: PartRecord(*part) for key, part in parts.items()})
        shares.append(share_of_rank(job, rank, tensors, PartRecord(*rank_state), state))
    manifest = Manifest.joined(shares)
    text = manifest.dump()
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"its manifest has {len(text)} bytes; expected at most {MAX_MANIFEST_BYTES}. "
            "Save fewer, larger tensors, or shard them over fewer ranks."
        )
    check_sizes(job.partial, {name: record.size for name, record in manifest.files.items()})
    if isinstance(job.partial, ObjectPath):
        for name in job.partial.sizes().keys() - manifest.files.keys():  # left by a killed save with more ranks
            (job.partial / name).remove()
    _files.write_file(job.partial / MANIFEST_NAME, [text])
    _files.fsync(job.partial)
    if isinstance(job.partial, Path) and isinstance(job.folder, Path):
        _files.rename(job.partial, job.folder)
        _files.fsync(job.folder.parent)


def share_of_rank(
    job: SaveJob, rank: int, written: SafetensorsRecord, rank_state: PartRecord, state: PartRecord
) -> Manifest:
    """Return a rank's share of the manifest: its chunks and files.

    Rank 0 also records the shared state, and the tensors without elements, which have no chunks.
    """
    starts: dict[str, int] = {}
    end = written.header.size
    for key, record in written.tensors.items():
        starts[key], end = end, end + record.size
    infos = job.plan.tensors
    empty = [name for name, info in infos.items() if info.num_bytes == 0] if rank == 0 else []
    chunks: dict[str, list[Chunk]] = {name: [] for name in empty}
    for name, region in job.plan.parts[rank]:
        key = part_key(name, region)
        chunk = Chunk(region, tensors_name(rank), starts[key], written.tensors[key].digest)
        chunks.setdefault(name, []).append(chunk)
    files = {
        tensors_name(rank): FileRecord(end, written.header),
        rank_state_name(rank): FileRecord(rank_state.size, rank_state),
    }
    if rank == 0:
        files[STATE_NAME] = FileRecord(state.size, state)
    tensors = {name: TensorRecord(infos[name], tuple(each)) for name, each in chunks.items()}
    return Manifest(job.run_id, job.step, job.metric, job.mesh, len(job.plan.parts), tensors, files)
