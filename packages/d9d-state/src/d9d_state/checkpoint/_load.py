"""Loading of a checkpoint's chunks into each rank's shards, independent of the mesh it was saved on."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from d9d_dist import Region, local_region, local_tensor
from d9d_state._member import AnyPath
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.save_plan import part_key
from d9d_state.model_folder import ModelFolder
from d9d_state.region_reader import RegionReader
from d9d_state.safetensors_header import StoredTensor
from d9d_state.tensor_info import TensorInfo


def mismatches(info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the error text that lists tensors which cannot be loaded from a checkpoint; `None` if there are none."""
    saved = info.tensors
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    for name, tensor in tensors.items():
        wanted = TensorInfo.of(tensor)
        if name in saved and saved[name] != wanted:
            problems.append(f"{name} is {saved[name].describe()}, expected {wanted.describe()}")
        if tensor.is_meta:
            problems.append(f"{name} is on the meta device, materialize it first")
    return f"{info.root} does not match the tensors to load: {'; '.join(problems)}." if problems else None


def load_tensors(info: CheckpointInfo, tensors: Mapping[str, Tensor], *, threads: int) -> None:
    """Load tensors in place; each rank reads only its local shards. No collectives."""
    places: dict[str, tuple[AnyPath, StoredTensor]] = {}  # each chunk is read as a tensor of its own
    reads: list[tuple[str, Region, Tensor]] = []
    for name, tensor in tensors.items():
        record = info.manifest.tensors[name]
        mine, local = local_region(tensor, name), local_tensor(tensor).detach()
        for chunk in record.chunks:
            if part := mine.intersect(chunk.region):
                key, chunk_info = part_key(name, chunk.region), TensorInfo(chunk.region.sizes, record.info.dtype)
                places[key] = info.root / chunk.file, StoredTensor(chunk_info, chunk.start)
                reads.append((key, part.relative_to(chunk.region), part.relative_to(mine).of(local)))
    with (
        RegionReader(ModelFolder.of(info.root, places)) as reader,
        ThreadPoolExecutor(threads, thread_name_prefix="d9d-load") as pool,
    ):
        for _ in pool.map(lambda read: reader.read_into(*read), reads):
            pass
