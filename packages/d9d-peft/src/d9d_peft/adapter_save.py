"""Saving of a model's trained tensors in the layout of Hugging Face `peft`; the main process writes the files."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor, nn

from d9d_dist import DistributedContext, agree, full_tensor, gather_json
from d9d_dist.collectives.tree_gather import gather_variadic
from d9d_dist.durable_files import replacing_files
from d9d_peft.adapter import DEFAULT_ADAPTER
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
    *,
    adapter: str = DEFAULT_ADAPTER,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Save the trained tensors of a model in the layout of Hugging Face `peft`. Collective over the job.

    The files hold LoRA or DoRA adapters and fully fine-tuned modules (`modules_to_save`). The ranks of each pipeline
    stage gather full tensors. The main process collects the tensors of all stages in host memory and writes them.

    Args:
        model: The whole model, or this rank's pipeline stages of it; materialized, and for DoRA with loaded weights.
        folder: Output folder. Files of an earlier save are replaced one by one, each by an atomic rename.
        base_mapper: Mapper from the base checkpoint to the whole model before `inject`; `None` if the names are the
            same. Adapters use the names of the base checkpoint. Experts get one adapter each if the base checkpoint
            stores one weight per expert; otherwise the names follow peft's `target_parameters`.
        ctx: Distributed context; `None` for a single process.
        adapter: Name of the adapters, as passed to `inject`. The files do not contain the name.
        base_model: Name or folder of the base model, for `base_model_name_or_path` of the files.
        task_type: Task of peft, such as `CAUSAL_LM`, by which its auto classes choose the class of the model.

    Raises:
        UserError: On all ranks, if the model has no adapters of this name, or both LoRA and DoRA adapters. Also if a
            trained tensor has no counterpart in the base checkpoint, such as a weight that joins several tensors.
        StateError: On all ranks, if writing failed. A file that was not yet replaced keeps its old contents.
    """
    stored, is_dora = agreed_adapters(model, base_mapper, ctx, adapter)
    # The first rank of each pipeline stage sends the stage's tensors to the main process.
    keeps = ctx is None or dist.get_process_group_ranks(ctx.group_for("regular", "pp"))[0] == 0
    tensors = _gather(stored, keeps=keeps)
    low_ranks = {
        "layers": {name: asdict(layer.adapter.low_rank) for layer in stored.layers for name in layer.names},
        "parameters": {parameter.name: asdict(parameter.low_rank) for parameter in stored.parameters},
    }
    parts = _collect(_serialize(tensors), {**low_ranks, "modules": list(stored.modules)}, ctx) if keeps else []
    problem = None
    if ctx is None or ctx.is_main_process:
        try:
            names = {"base_model": base_model, "task_type": task_type}
            _write(Path(folder), parts, is_dora=is_dora, names=names)
        except OSError as error:
            problem = f"writing the adapters failed: {error}."
    agree(problem, error=StateError, alone=ctx is None)


def _gather(stored: StoredAdapters, *, keeps: bool) -> dict[str, Tensor]:
    """Gather full tensors in host memory, by name in the file; empty unless `keeps`. Collective over the stage."""
    kept: dict[str, Tensor] = {}
    of_modules = ({key: full_tensor(each) for key, each in own.items()} for own in stored.modules.values())
    of_adapters = (adapted.tensors() for adapted in (*stored.layers, *stored.parameters))
    for gathered in chain(of_adapters, of_modules):  # one layer at a time
        kept.update({key: tensor.contiguous().to("cpu") for key, tensor in gathered.items()} if keeps else {})
    return kept


def _collect(
    tensors: bytes, description: dict[str, Any], ctx: DistributedContext | None
) -> list[tuple[bytes, dict[str, Any]]]:
    """Gather the safetensors data and descriptions of all stages on the main process; other ranks get an empty list.

    Collective over the main process's `pp` group.
    """
    if ctx is None or ctx.size("regular", "pp") == 1:
        return [(tensors, description)]
    group = ctx.group_for("regular", "pp")
    descriptions = gather_json(description, group)
    gathered = gather_variadic(torch.frombuffer(bytearray(tensors), dtype=torch.uint8), group)
    return [(_to_bytes(data), each) for data, each in zip(gathered or [], descriptions, strict=bool(gathered))]


def _serialize(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file. `safetensors.torch.save` needs NumPy, and refuses tied tensors."""
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    }
    return bytes(serialize(specs, metadata=metadata))


def _to_bytes(data: Tensor) -> bytes:
    received = bytearray(data.numel())
    torch.frombuffer(received, dtype=torch.uint8).copy_(data)
    return bytes(received)


def _write(
    folder: Path, parts: list[tuple[bytes, dict[str, Any]]], *, is_dora: bool, names: dict[str, str | None]
) -> None:
    tensors = {name: tensor for data, _ in parts for name, tensor in load(data).items()}
    layers, parameters = (
        {name: LowRank(**fields) for _, part in parts for name, fields in part[key].items()}
        for key in ("layers", "parameters")
    )
    modules = list(dict.fromkeys(name for _, part in parts for name in part["modules"]))
    config = adapter_config(layers, parameters, modules, is_dora=is_dora, **names)
    contents = {
        TENSORS_NAME: _serialize(tensors, {"format": "pt"}),
        CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_files(*(folder / name for name in contents)) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
