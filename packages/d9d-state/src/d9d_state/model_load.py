"""Weights from safetensors files into a module: every value straight into its place."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

from torch import nn

from d9d_state._progress import byte_bar
from d9d_state._sharding import local_part
from d9d_state.mapper._check import refuse_mismatches, skipped_groups
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.graph import StateMapper
from d9d_state.mapper.names import identity, identity_of
from d9d_state.model_folder import ModelFolder
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.region_reader import RegionReader
from d9d_state.tensor_info import TensorInfo


def load_model_state(
    model: nn.Module,
    folder: str | Path,
    mapper: StateMapper | None = None,
    *,
    unused: Literal["error", "ignore"] = "error",
    num_readers: int = 4,
    progress: bool = True,
) -> None:
    """Fill a module's parameters and persistent buffers from a folder in the Hugging Face layout, in place.

    Everything is checked against the files' headers before the first value is written. Then each value is read straight
    into its place: a rank reads the bytes of its own shards and no others, and files that it needs nothing from stay
    closed. Only where an operation of the mapper computes (`cast`, `transform`), its group, or the part of it that is
    needed, stands in memory beside the model. Issues no collective.

    Of a mapper that is wider than the module, because the module is one pipeline stage, the groups that fill the
    module are used. Of tied parameters, one name in the files is enough; of several, the first that the mapper fills
    counts.

    Args:
        model: Materialised, on any device; tensors are plain or `DTensor`. Floating dtypes are converted.
        folder: Where `model.safetensors` is, or `model.safetensors.index.json` and the files that it names.
        mapper: From the names and shapes on disk to those of the whole model; `None` means that they are the same.
        unused: Whether tensors in the files that the mapper does not consume are refused. With no mapper, a pipeline
            stage must ignore them, since the files hold the other stages too.
        num_readers: How many groups are read at the same time.
        progress: Whether each rank shows a bar, where the standard error is a terminal.

    Raises:
        UserError: Listing every mismatch between files, mapper and model; or if the folder is not sound.
        ValueError: If the model is still on the meta device.
        StateError: If a file cannot be read. Some of the model is filled then.
    """
    source, mapper, outputs = _checked(model, folder, mapper, unused=unused)
    tensors = module_tensors(model)
    destinations = {name: Destination(*local_part(tensors[name])) for names in outputs for name in names}
    fillings = [{name: destinations[name] for name in names} for names in outputs]
    _fill_all(mapper, fillings, source, num_readers=num_readers, progress=progress)


def check_model_state(
    model: nn.Module,
    folder: str | Path,
    mapper: StateMapper | None = None,
    *,
    unused: Literal["error", "ignore"] = "error",
) -> None:
    """Raise what `load_model_state` would raise before it reads the first value.

    Args:
        model: On any device, `meta` included.
        folder: As in `load_model_state`, like all that follows.
        mapper: From the names and shapes on disk to those of the whole model.
        unused: Whether tensors in the files that the mapper does not consume are refused.

    Raises:
        UserError: Listing every mismatch between files, mapper and model; or if the folder is not sound.
    """
    _checked(model, folder, mapper, unused=unused)


def _checked(
    model: nn.Module, folder: str | Path, mapper: StateMapper | None, *, unused: Literal["error", "ignore"]
) -> tuple[ModelFolder, StateMapper, list[list[str]]]:
    """The files, the part of the mapper that fills the model, and what each of its groups has to fill."""
    source = ModelFolder.open(folder)
    tensors = module_tensors(model)
    first_names = aliases(model)
    whole = identity_of(model) if mapper is None else mapper
    # Without a mapper, a tied tensor may be in the files under any of its names.
    part = identity(*tensors) if mapper is None else mapper.restrict(outputs=tensors)
    consumed = {*whole.inputs, *first_names} if mapper is None else whole.inputs
    refuse_mismatches(
        part,
        held=source.tensors,
        wanted={name: TensorInfo.of(tensor) for name, tensor in tensors.items()},
        first_names=first_names,
        consumed=consumed if unused == "error" else source.tensors.keys(),
    )
    skipped = skipped_groups(part, held=source.tensors, first_names=first_names)
    outputs: list[list[str]] = []
    filled: set[str] = set()
    for group in part.groups:
        if not group.inputs or group in skipped:
            continue
        # What is there under several names of one tensor is taken from the first: threads must not fill it together.
        names = {first_names[name]: name for name in reversed(group.outputs) if first_names[name] not in filled}
        filled.update(names)
        outputs.append(list(names.values()))
    return source, part, [names for names in outputs if names]


def _fill_all(
    mapper: StateMapper,
    fillings: Sequence[Mapping[str, Destination]],
    source: ModelFolder,
    *,
    num_readers: int,
    progress: bool,
) -> None:
    """Fill the groups, several at a time; the first failure ends it."""
    sizes = [sum(part.tensor.nbytes for part in filling.values()) for filling in fillings]
    with (
        RegionReader(source) as reader,
        byte_bar("loading", sum(sizes), visible=progress) as bar,
        ThreadPoolExecutor(num_readers, thread_name_prefix="d9d-reader") as pool,
    ):
        size_of = {
            pool.submit(mapper.fill, filling, reader): size for filling, size in zip(fillings, sizes, strict=True)
        }
        try:
            for task in as_completed(size_of):
                task.result()
                bar.update(size_of[task])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
