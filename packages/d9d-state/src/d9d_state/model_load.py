"""Weights from safetensors files into a module, one group of tensors at a time."""

from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol, Self, final

from safetensors import safe_open
from torch import Tensor, nn

from d9d_state._sharding import copy_whole
from d9d_state.mapper._check import refuse_mismatches, skipped_groups
from d9d_state.mapper.graph import StateMapper
from d9d_state.mapper.names import identity_of
from d9d_state.model_folder import ModelFolder
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.tensor_info import TensorInfo


def load_model_state(
    model: nn.Module,
    folder: str | Path,
    mapper: StateMapper | None = None,
    *,
    unused: Literal["error", "ignore"] = "error",
) -> None:
    """Fill a module's parameters and persistent buffers from a folder in the Hugging Face layout, in place.

    Everything is checked against the files' headers before the first value is written. Then one group of the mapper
    is read, transformed, copied and released after the other; files that this module needs nothing from stay closed.
    Issues no collective: each rank reads for itself and keeps its shards only.

    Of a mapper that is wider than the module, because the module is one pipeline stage, the groups that fill the
    module are used. Of tied parameters, one name in the files is enough.

    Args:
        model: Materialised, on any device; tensors are plain or `DTensor`. Floating dtypes are converted.
        folder: Where `model.safetensors` is, or `model.safetensors.index.json` and the files that it names.
        mapper: From the names and shapes on disk to those of the whole model; `None` means that they are the same.
        unused: Whether tensors in the files that the mapper does not consume are refused. With no mapper, a pipeline
            stage must ignore them, since the files hold the other stages too.

    Raises:
        UserError: Listing every mismatch between files, mapper and model; or if the folder is not sound.
        ValueError: If the model is still on the meta device.
    """
    source = ModelFolder.open(folder)
    tensors = module_tensors(model)
    first_names = aliases(model)
    whole = identity_of(model) if mapper is None else mapper
    part = whole.restrict(outputs=tensors)
    consumed = {*whole.inputs, *first_names} if mapper is None else whole.inputs
    refuse_mismatches(
        part,
        held=source.tensors,
        wanted={name: TensorInfo.of(tensor) for name, tensor in tensors.items()},
        first_names=first_names,
        consumed=consumed if unused == "error" else source.tensors.keys(),
    )
    skipped = skipped_groups(part, held=source.tensors, first_names=first_names)
    groups = [group for group in part.groups if group.inputs and group not in skipped]
    with _Reader(source, [name for group in groups for name in group.inputs]) as reader:
        for group in groups:
            for name, tensor in part.apply({name: reader.take(name) for name in group.inputs}).items():
                copy_whole(tensors[name], tensor)


class _OpenFile(Protocol):
    """What is used of `safetensors.safe_open`."""

    def get_tensor(self, name: str) -> Tensor: ...


@final
class _Reader:
    """Opens a file when its first tensor is taken, and closes it with its last."""

    def __init__(self, source: ModelFolder, names: list[str]) -> None:
        self._source = source
        self._open: dict[Path, tuple[_OpenFile, ExitStack]] = {}
        self._left: dict[Path, int] = {}
        for name in names:
            path = source.files[name]
            self._left[path] = self._left.get(path, 0) + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for _file, stack in self._open.values():
            stack.close()

    def take(self, name: str) -> Tensor:
        path = self._source.files[name]
        if path not in self._open:
            opening = ExitStack()
            self._open[path] = (opening.enter_context(safe_open(path, framework="pt")), opening)
        file, stack = self._open[path]
        tensor = file.get_tensor(name)
        self._left[path] -= 1
        if self._left[path] == 0:
            stack.close()
            del self._open[path]
        return tensor
