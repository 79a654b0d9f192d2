"""Read a model folder through a mapper, one group at a time, without a module."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state._member import AnyPath
from d9d_state._progress import byte_bar
from d9d_state.mapper._check import Unused, refuse_mismatches
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.names import identity
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.model_folder import ModelFolder
from d9d_state.region_reader import RegionReader
from d9d_state.tensor_info import TensorInfo

_UNKNOWN = TensorInfo((), torch.float32)  # placeholder for outputs without a value, which are not compared


def read_model_state(
    folder: str | AnyPath,
    mapper: StateMapper | None = None,
    *,
    device: torch.device | str = "cpu",
    unused: Unused = "error",
    num_readers: int = 4,
    progress: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a mapper's output tensors, unsharded, computed from the tensors in a folder. No collectives.

    Files and mapper are checked before the first tensor is read. Only one group is in memory at a time, in addition to
    the tensors that the caller keeps.

    Args:
        folder: Folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it lists.
        mapper: Maps names and shapes on disk to those of the outputs; `None` if they are equal.
        device: Device of the yielded tensors.
        unused: `"error"` refuses tensors in the files that the mapper does not consume; `"ignore"` skips them.
        num_readers: Number of threads that read a large tensor.
        progress: Show a progress bar on each rank if standard error is a terminal.

    Yields:
        Name and tensor of every output, in the order of the mapper's groups. Outputs of `keep` are skipped.

    Raises:
        UserError: Listing every mismatch between files and mapper; or if the folder is malformed.
        StateError: If a file cannot be read.
    """
    source = ModelFolder.open(folder)
    mapper = identity(*source.tensors) if mapper is None else mapper
    infos = produced_tensors(mapper, source, unused=unused)
    return _read(source, mapper, infos, device=device, num_readers=num_readers, progress=progress)


def produced_tensors(mapper: StateMapper, source: ModelFolder, *, unused: Unused) -> dict[str, TensorInfo]:
    """Infer shape and dtype of a mapper's outputs for a folder; raise `UserError` that lists every mismatch."""
    infos: dict[str, TensorInfo] = {}
    for group in mapper.groups:
        if group.inputs and all(name in source.tensors for name in group.inputs):
            # refuse_mismatches() repeats the inference and reports its errors together with all other mismatches.
            with suppress(ValueError):
                infos.update(mapper.infer({name: source.tensors[name] for name in group.inputs}))
    refuse_mismatches(
        mapper,
        held=source.tensors,
        wanted={name: infos.get(name, _UNKNOWN) for name in mapper.outputs},
        first_names={name: name for name in mapper.outputs},
        consumed=mapper.inputs,
        unused=unused,
    )
    return infos


def _read(
    source: ModelFolder,
    mapper: StateMapper,
    infos: Mapping[str, TensorInfo],
    *,
    device: torch.device | str,
    num_readers: int,
    progress: bool,
) -> Iterator[tuple[str, Tensor]]:
    total = sum(info.num_bytes for info in infos.values())
    with (
        ThreadPoolExecutor(num_readers, thread_name_prefix="d9d-reader") as pool,
        RegionReader(source, pool=pool) as reader,
        byte_bar("reading", total, visible=progress) as bar,
    ):
        for group in mapper.groups:
            if not group.inputs or not group.outputs:
                continue
            outputs = {
                name: torch.empty(infos[name].shape, dtype=infos[name].dtype, device=device) for name in group.outputs
            }
            mapper.fill(
                {name: Destination(Region.whole(infos[name].shape), tensor) for name, tensor in outputs.items()}, reader
            )
            bar.update(sum(tensor.nbytes for tensor in outputs.values()))
            while outputs:
                name = next(iter(outputs))
                yield name, outputs.pop(name)
