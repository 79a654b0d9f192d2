"""Where torch's checkpoint planning meets our files: it decides who writes and reads which box, here it is done.

The planners bring resharding between meshes. Their usual storage keeps a pickled index and no digests: it is replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from d9d_state import _files
from d9d_state.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Chunk,
    Manifest,
    TensorRecord,
    rank_state_name,
    tensors_name,
)
from d9d_state.safetensors_file import write_safetensors
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that one checkpoint holds besides tensors.

    Attributes:
        partial: The folder that is written to; it exists.
        folder: The name that it gets.
        run_id: Which run it is; the main process's counts.
        step: Number of optimizer steps that were done.
        mesh: Size of every mesh axis.
        rank: This rank.
        num_ranks: How many ranks save.
        state: Canonical JSON; the main process's counts.
        rank_state: Canonical JSON of this rank.
    """

    partial: Path
    folder: Path
    run_id: str
    step: int
    mesh: Mapping[str, int]
    rank: int
    num_ranks: int
    state: bytes
    rank_state: bytes


@dataclass(frozen=True, slots=True)
class _Written:
    """A file that a rank wrote, and which chunks are in it: name and offset of each, with its key."""

    file: str
    record: _files.FileRecord
    keys: Mapping[tuple[str, tuple[int, ...]], str]


@final
class CheckpointWriter(StorageWriter):
    """Writes a safetensors file per rank; on the coordinator, commits the folder when all ranks have written theirs."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder was made before."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep what the planner wants to write, except boxes without elements."""
        return SavePlan(
            [
                item
                for item in plan.items
                if item.tensor_data is None or 0 not in item.tensor_data.chunk.sizes or 0 in item.tensor_data.size
            ],
            planner_data=plan.planner_data,
        )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Keep what the planner decided."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files and bring them to the disk."""
        keys: dict[tuple[str, tuple[int, ...]], str] = {}
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            offset = tuple(item.index.offset or (0,) * tensor.ndim)
            key = f"{item.index.fqn}@{','.join(map(str, offset))}"
            keys[item.index.fqn, offset] = key
            tensors[key] = tensor
        partial, rank = self._job.partial, self._job.rank
        written = [
            _Written(tensors_name(rank), write_safetensors(partial / tensors_name(rank), tensors), keys),
            _Written(
                rank_state_name(rank), _files.write_file(partial / rank_state_name(rank), [self._job.rank_state]), {}
            ),
        ]
        _files.fsync_folder(partial)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(part.file), part.record.size, part) for part in written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest last, and give the folder its name: from here on it is a checkpoint."""
        job = self._job
        written: list[_Written] = [result.storage_data for of_rank in results for result in of_rank]
        state = _Written(STATE_NAME, _files.write_file(job.partial / STATE_NAME, [job.state]), {})
        manifest = Manifest(
            run_id=job.run_id,
            step=job.step,
            mesh=job.mesh,
            num_ranks=job.num_ranks,
            tensors=_tensor_records(metadata, written),
            files={part.file: part.record for part in [*written, state]},
        )
        _files.write_file(job.partial / MANIFEST_NAME, [manifest.dump()])
        _files.fsync_folder(job.partial)
        _files.rename(job.partial, job.folder)
        _files.fsync_folder(job.folder.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Never guessed from a path."""
        return False


@final
class CheckpointReader(StorageReader):
    """Reads the boxes that a load needs from the files that the manifest names."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the manifest says, in torch's terms."""
        return Metadata({name: _storage_metadata(record) for name, record in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep what the planner wants to read."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep what the planner decided."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every box into its place, one file after the other."""
        by_file: dict[str, list[tuple[ReadItem, str]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            by_file.setdefault(chunk.file, []).append((item, chunk.key))
        for name, items in by_file.items():
            with safe_open(_files.member(self._folder, name), framework="pt") as file:
                for item, key in items:
                    _copy_box(file.get_tensor(key), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Never guessed from a path."""
        return False

    def _chunk(self, index: MetadataIndex) -> Chunk:
        record = self._manifest.tensors[index.fqn]
        offset = tuple(index.offset or (0,) * len(record.info.shape))
        return next(chunk for chunk in record.chunks if chunk.offset == offset)


@torch.no_grad()
def _copy_box(stored: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(stored)
    planner.commit_tensor(item, target)


def _tensor_records(metadata: Metadata, written: list[_Written]) -> dict[str, TensorRecord]:
    places = {place: (part.file, key) for part in written for place, key in part.keys.items()}
    records: dict[str, TensorRecord] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
        chunks = [
            Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *places[name, tuple(chunk.offsets)])
            for chunk in entry.chunks
        ]
        records[name] = TensorRecord(TensorInfo(tuple(entry.size), entry.properties.dtype), tuple(chunks))
    return records


def _storage_metadata(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=record.info.dtype),
        torch.Size(record.info.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in record.chunks],
    )
