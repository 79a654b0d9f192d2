"""What was trained of a model, in files that Hugging Face `peft` reads: written by one process, decided by all."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from d9d_dist import DistributedContext, gather_objects
from d9d_peft._consensus import agree
from d9d_peft._sharded import whole
from d9d_peft.low_rank import LowRank
from d9d_peft.peft_config import adapter_config
from d9d_peft.peft_layout import CONFIG_NAME, TENSORS_NAME
from d9d_peft.stored_adapters import StoredAdapters, agreed_adapters
from d9d_state import StateError, StateMapper


def save_adapters(
    model: nn.Module,
    folder: str | Path,
    base_mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
) -> None:
    """Write what was trained of a model, and nothing else, in the layout of Hugging Face `peft`. Collective.

    That is the adapters of LoRA or DoRA, and whole modules that are trained as they are (`modules_to_save`). The ranks
    of each pipeline stage gather whole tensors; the main process collects those of all stages in its memory, and
    writes.

    Args:
        model: Materialised and, for DoRA, loaded. The whole model, or this rank's pipeline stages of it.
        folder: Where to write; files of an earlier save are replaced one by one, each as a whole.
        base_mapper: From the names of the base checkpoint to those of the model before `inject`, as for loading it; the
            adapters are named as in that checkpoint: one for each expert where it has one weight for each, else as
            `peft` names those of `target_parameters`. On every stage it is that of the whole model. `None` if the
            names are the same.
        ctx: The ranks; `None` for a process on its own.

    Raises:
        UserError: On every rank, if the model has no adapters, they are of both kinds, or something that is trained has
            no counterpart in the checkpoint, such as a part of a joined weight.
        StateError: On every rank, if writing failed. What was there before is still there then.
    """
    stored, is_dora = agreed_adapters(model, base_mapper, ctx)
    keeps = ctx is None or _speaks_for_stage(ctx)
    tensors = _gather(stored, keeps=keeps)
    layers = {name: layer.low_rank for layer in stored.layers for name in layer.names}
    parameters = {parameter.name: parameter.low_rank for parameter in stored.parameters}
    parts = _collect((save(tensors), layers, parameters, list(stored.modules)), ctx) if keeps else None
    failure = None
    if ctx is None or ctx.is_main_process:
        assert parts is not None
        failure = _attempt(lambda: _write(Path(folder), parts, is_dora=is_dora))
    agree(failure, ctx, error=StateError)


def _gather(stored: StoredAdapters, *, keeps: bool) -> dict[str, Tensor]:
    """Whole tensors by their names in files, in the host's memory. Collective.

    Args:
        stored: What this rank has.
        keeps: Whether this rank needs them; if not, it gathers with the others and drops them.
    """
    kept: dict[str, Tensor] = {}

    def keep(gathered: dict[str, Tensor]) -> None:
        kept.update({key: tensor.contiguous().to("cpu") for key, tensor in gathered.items()} if keeps else {})

    for adapted in (*stored.layers, *stored.parameters):
        keep(adapted.tensors())
    for tensors in stored.modules.values():
        keep({key: whole(tensor) for key, tensor in tensors.items()})
    return kept


def _speaks_for_stage(ctx: DistributedContext) -> bool:
    """Whether this rank is the one of its pipeline stage that speaks with the main process."""
    return dist.get_process_group_ranks(ctx.group_for("regular", "pp"))[0] == 0


_Part = tuple[bytes, dict[str, LowRank], dict[str, LowRank], list[str]]
"""What a stage has: tensors as a file, its layers, its parameters, and its modules that are trained as they are."""


def _collect(part: _Part, ctx: DistributedContext | None) -> list[_Part] | None:
    """What all stages have, on the main process. Collective over those that speak for a stage."""
    if ctx is None or ctx.size("regular", "pp") == 1:
        return [part]
    return gather_objects(part, ctx.group_for("regular", "pp"))


def _write(folder: Path, parts: list[_Part], *, is_dora: bool) -> None:
    tensors: dict[str, Tensor] = {}
    layers: dict[str, LowRank] = {}
    parameters: dict[str, LowRank] = {}
    modules: dict[str, None] = {}
    for data, part_layers, part_parameters, part_modules in parts:
        tensors.update(load(data))
        layers.update(part_layers)
        parameters.update(part_parameters)
        modules.update(dict.fromkeys(part_modules))
    config = adapter_config(layers, parameters, list(modules), is_dora=is_dora)
    contents = {
        TENSORS_NAME: save(tensors, metadata={"format": "pt"}),
        CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    partials = {name: folder / f".{name}.partial" for name in contents}
    try:
        for name, content in contents.items():
            _write_through(partials[name], content)
        for name, partial in partials.items():
            partial.replace(folder / name)
    finally:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    _bring_to_disk(folder, os.O_RDONLY)


def _attempt(work: Callable[[], None]) -> str | None:
    """Do what may fail at the disk, and say why it did."""
    try:
        work()
    except OSError as error:
        return f"writing the adapters failed: {error}."
    return None


def _write_through(path: Path, content: bytes) -> None:
    """Write a file, and bring it to the disk."""
    path.write_bytes(content)
    _bring_to_disk(path, os.O_RDWR)


def _bring_to_disk(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
