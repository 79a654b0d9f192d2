"""Loading of a checkpoint's chunks into each rank's shards, independent of the mesh it was saved on.

Each rank uses torch's `DefaultLoadPlanner` to find which chunks overlap its local shards.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from d9d_state.checkpoint.boxes import Box
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.manifest import TensorRecord
from d9d_state.checkpoint.save_plan import part_key
from d9d_state.mapper.region import Region
from d9d_state.model_folder import ModelFolder
from d9d_state.region_reader import RegionReader
from d9d_state.tensor_info import TensorInfo


def mismatches(info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> str | None:
    """Compare a checkpoint with the tensors to load; return an error text, or `None` if all of them can be loaded."""
    saved = info.tensors
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    for name, tensor in tensors.items():
        wanted = TensorInfo.of(tensor)
        if name in saved and saved[name] != wanted:
            problems.append(f"{name} is {saved[name].describe()}, expected {wanted.describe()}")
        if tensor.is_meta:
            problems.append(f"{name} is on the meta device, materialize it first")
    return f"{info.folder} does not match the tensors to load: {'; '.join(problems)}." if problems else None


def load_tensors(info: CheckpointInfo, tensors: Mapping[str, Tensor], *, threads: int) -> None:
    """Load tensors in place; each rank reads only its local shards. Issues no collective.

    Raises:
        StateError: If a file cannot be read.
        ValueError: If a `DTensor` has a Partial placement.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({name: _metadata(record) for name, record in info.manifest.tensors.items()})
    planner.set_up_planner(dict(tensors), metadata)
    items = planner.create_local_plan().items
    with (
        RegionReader(_as_folder(info)) as reader,
        ThreadPoolExecutor(threads, thread_name_prefix="d9d-load") as pool,
    ):
        for _ in pool.map(partial(_fill, planner, reader), items):
            pass


@torch.no_grad()
def _fill(planner: DefaultLoadPlanner, reader: RegionReader, item: ReadItem) -> None:
    lengths = tuple(item.lengths)
    key = part_key(item.storage_index.fqn, Box(tuple(item.storage_index.offset or (0,) * len(lengths)), lengths))
    target = planner.resolve_tensor(item).detach()
    reader.read_into(key, Region(tuple(item.storage_offsets), lengths), target)


def _as_folder(info: CheckpointInfo) -> ModelFolder:
    """Return an index of the checkpoint's chunks, each as a separate tensor."""
    chunks = {
        part_key(name, chunk.box): (chunk, TensorInfo(chunk.box.shape, record.info.dtype))
        for name, record in info.manifest.tensors.items()
        for chunk in record.chunks
    }
    return ModelFolder(
        info.folder,
        {key: chunk_info for key, (_, chunk_info) in chunks.items()},
        {key: info.folder / chunk.file for key, (chunk, _) in chunks.items()},
        {key: chunk.start for key, (chunk, _) in chunks.items()},
    )


def _metadata(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=record.info.dtype),
        torch.Size(record.info.shape),
        [_chunk_metadata(chunk.box) for chunk in record.chunks],
    )


def _chunk_metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
