"""Loading of safetensors weights directly into a module's parameters and buffers."""

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

from torch import Tensor, nn

from d9d_dist import local_region, local_tensor
from d9d_state._member import AnyPath
from d9d_state._progress import byte_bar
from d9d_state.mapper._check import Unused, refuse_mismatches, skipped_groups
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.names import identity, identity_of
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.model_folder import ModelFolder
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.region_reader import RegionReader
from d9d_state.tensor_info import TensorInfo


def load_model_state(
    model: nn.Module,
    folder: str | AnyPath,
    mapper: StateMapper | None = None,
    *,
    unused: Unused = "error",
    num_readers: int = 4,
    progress: bool = True,
) -> None:
    """Load a module's parameters and persistent buffers in place from a folder in the Hugging Face layout.

    The files' headers are checked against mapper and model before any value is written. Then each rank reads the bytes
    of its own shards directly into the parameters, and opens only the files that contain them. Operations that compute
    (`transform`, `dequantize`) need temporary memory for the required regions, or for the full tensors of their group
    if a function is not elementwise. No collectives.

    For a pipeline stage, only the mapper's groups that fill the module are used. A tied parameter needs only one of its
    names in the files; of several, the first that the mapper produces is loaded.

    Args:
        model: Materialized module on any device, with plain tensors or `DTensor`s. Values are converted between
            floating-point dtypes, except from float8.
        folder: Folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it lists. It
            may be a URL of an object store, such as `s3://bucket/model`; each rank requests the ranges of its shards.
        mapper: Maps names and shapes on disk to those of the whole model; `None` if they are equal.
        unused: `"error"` refuses tensors in the files that the mapper does not consume; `"ignore"` skips them. A
            pipeline stage without a mapper needs `"ignore"`, because the files also contain the other stages.
        num_readers: Number of groups that are read in parallel.
        progress: Show a progress bar on each rank if standard error is a terminal.

    Raises:
        UserError: Listing every mismatch between files, mapper and model; or if the folder is malformed.
        ValueError: If the model is on the meta device.
        StateError: If a file cannot be read. The model is then partially loaded.
    """
    source, mapper, outputs = _checked(model, folder, mapper, unused=unused)
    tensors = module_tensors(model)
    fillings = [{name: _destination(name, tensors[name]) for name in names} for names in outputs]
    sizes = [sum(part.tensor.nbytes for part in filling.values()) for filling in fillings]
    with (
        RegionReader(source) as reader,
        byte_bar("loading", sum(sizes), visible=progress) as bar,
        ThreadPoolExecutor(num_readers, thread_name_prefix="d9d-reader") as pool,
    ):
        # The first error cancels the remaining groups.
        for size, _ in zip(sizes, pool.map(mapper.fill, fillings, repeat(reader)), strict=True):
            bar.update(size)


def check_model_state(
    model: nn.Module,
    folder: str | AnyPath,
    mapper: StateMapper | None = None,
    *,
    unused: Unused = "error",
) -> None:
    """Run the checks of `load_model_state` without loading; the model may be on `meta`.

    Raises:
        UserError: Listing every mismatch between files, mapper and model; or if the folder is malformed.
    """
    _checked(model, folder, mapper, unused=unused)


def _destination(name: str, tensor: Tensor) -> Destination:
    """Return this rank's region of a tensor, empty outside the mesh, and the memory that stores it."""
    if tensor.is_meta:
        raise ValueError("the model is on the meta device; materialize it before loading its state.")
    region = local_region(tensor, name)
    return Destination(region, local_tensor(tensor).detach().view(region.sizes))


def _checked(
    model: nn.Module, folder: str | AnyPath, mapper: StateMapper | None, *, unused: Unused
) -> tuple[ModelFolder, StateMapper, list[list[str]]]:
    """Check files, mapper and model; return the files, the mapper restricted to the model, and outputs per group."""
    source = ModelFolder.open(folder)
    tensors = module_tensors(model)
    first_names = aliases(tensors)
    whole = identity_of(model) if mapper is None else mapper
    # Without a mapper, the files may contain a tied tensor under any of its names.
    part = identity(*tensors) if mapper is None else mapper.restrict(outputs=tensors)
    consumed = {*whole.inputs, *first_names} if mapper is None else whole.inputs
    refuse_mismatches(
        part,
        held=source.tensors,
        wanted={name: TensorInfo.of(tensor) for name, tensor in tensors.items()},
        first_names=first_names,
        consumed=consumed,
        unused=unused,
    )
    skipped = skipped_groups(part, held=source.tensors, first_names=first_names)
    outputs: list[list[str]] = []
    filled: set[str] = set()
    for group in part.groups:
        if not group.inputs or group in skipped:
            continue
        # Fill a tied tensor from its first available name only: two threads must not write the same memory.
        names = {first_names[name]: name for name in reversed(group.outputs) if first_names[name] not in filled}
        filled.update(names)
        outputs.append(list(names.values()))
    return source, part, [names for names in outputs if names]
