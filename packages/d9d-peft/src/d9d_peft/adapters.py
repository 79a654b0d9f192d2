"""LoRA adapters alone, in files that Hugging Face `peft` reads and writes.

The layout is that of https://huggingface.co/docs/peft/developer_guides/checkpoint: `adapter_model.safetensors` holds
`base_model.model.<module>.lora_A.weight` and `...lora_B.weight` for each module of the base model, and
`adapter_config.json` says how they are applied.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from d9d_dist import DistributedContext, UserError
from d9d_peft._pattern import shorten
from d9d_peft.lora import LoraLinear
from d9d_state import StateMapper

TENSORS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

_Layers: TypeAlias = Mapping[str, LoraLinear]


def save_adapters(
    model: nn.Module,
    folder: str | Path,
    base_mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
) -> None:
    """Write the LoRA adapters of a model in the layout of Hugging Face `peft`.

    Collective where parameters are sharded: every rank gathers them, the main process writes.

    Args:
        model: The whole model, materialised, with LoRA layers.
        folder: Where to write; files of an earlier save are replaced one by one, each as a whole.
        base_mapper: From the names of the base checkpoint to those of the model before `inject`, as for loading it; the
            adapters are named as in that checkpoint. `None` if the names are the same.
        ctx: The ranks; `None` for a process on its own.

    Raises:
        UserError: If the model has no LoRA layers, or the mapper joins the weight of one with others, so that the
            adapter has no counterpart in the checkpoint.
    """
    layers = _layers_by_checkpoint_name(model, base_mapper)
    tensors = {
        key: whole.contiguous().to("cpu")
        for name, layer in layers.items()
        for key, whole in zip(_keys(name), (_whole(layer.lora_a), _whole(layer.lora_b)), strict=True)
    }
    if ctx is None or ctx.is_main_process:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{TENSORS_NAME}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        _commit(partial, folder / TENSORS_NAME)
        partial = folder / f".{CONFIG_NAME}.partial"
        partial.write_text(json.dumps(_config(layers), indent=2) + "\n", encoding="utf-8")
        _commit(partial, folder / CONFIG_NAME)


@torch.no_grad()
def load_adapters(model: nn.Module, folder: str | Path, base_mapper: StateMapper | None = None) -> None:
    """Fill the LoRA layers of a model from a folder that `save_adapters` or Hugging Face `peft` wrote, in place.

    Issues no collective: each rank reads for itself and keeps its shards.

    Args:
        model: Materialised, with the LoRA layers that the adapters are for.
        folder: Where `adapter_model.safetensors` and `adapter_config.json` are.
        base_mapper: As for `save_adapters`.

    Raises:
        UserError: If the adapters are for other layers, or of another rank or scale, or of a kind that is not plain
            LoRA; nothing is changed then.
    """
    folder = Path(folder)
    layers = _layers_by_checkpoint_name(model, base_mapper)
    config = _read_config(folder / CONFIG_NAME)
    targets = {
        key: parameter
        for name, layer in layers.items()
        for key, parameter in zip(_keys(name), (layer.lora_a, layer.lora_b), strict=True)
    }
    with safe_open(_existing(folder / TENSORS_NAME), framework="pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
        _refuse_mismatch(shapes, {key: tuple(target.shape) for key, target in targets.items()}, folder)
        _refuse_other_scale(config, layers, folder)
        for key, target in targets.items():
            _copy(target, file.get_tensor(key))


def _layers_by_checkpoint_name(model: nn.Module, base_mapper: StateMapper | None) -> dict[str, LoraLinear]:
    """The LoRA layers by the name that the layer has in the base checkpoint."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    if not layers:
        raise UserError("got a model without LoRA layers; expected one that inject() was called on with LoRA.")
    if base_mapper is None:
        return layers
    inputs_of = {output: group.inputs for group in base_mapper.groups for output in group.outputs}
    return {_checkpoint_name(name, inputs_of): layer for name, layer in layers.items()}


def _checkpoint_name(name: str, inputs_of: Mapping[str, tuple[str, ...]]) -> str:
    inputs = inputs_of.get(f"{name}.weight", ())
    if len(inputs) != 1 or not inputs[0].endswith(".weight"):
        raise UserError(
            f"{name}.weight comes from {shorten(list(inputs))} of the base checkpoint; expected one tensor named "
            "'....weight'. Pass the mapper that loads the model before inject()."
        )
    return inputs[0].removesuffix(".weight")


def _keys(name: str) -> tuple[str, str]:
    return f"base_model.model.{name}.lora_A.weight", f"base_model.model.{name}.lora_B.weight"


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _copy(target: Tensor, whole: Tensor) -> None:
    if isinstance(target, DTensor):
        # Without a source rank every rank takes its own part of what it has read itself.
        whole = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)


def _config(layers: _Layers) -> dict[str, object]:
    """The configuration that `peft` needs to apply the adapters; what most layers have is the default."""
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": list(layers),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": Counter(layer.dropout for layer in layers.values()).most_common(1)[0][0],
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {re.escape(name): value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(name): value for name, value in alphas.items() if value != alpha},
        "use_rslora": False,
        "use_dora": False,
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_existing(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}.") from error
    expected = {"peft_type": "LORA", "use_dora": False, "bias": "none", "lora_bias": False}
    got = {key: config.get(key, value) for key, value in expected.items()}
    if got != expected:
        raise UserError(f"{path} says {got}; expected {expected}: only plain LoRA can be loaded.")
    return config


def _refuse_mismatch(got: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    sections = {
        "in the folder, but not in the model": [key for key in got if key not in expected],
        "in the model, but not in the folder": [key for key in expected if key not in got],
        "of another shape": [
            f"{key}: got {list(got[key])}, expected {list(shape)}"
            for key, shape in expected.items()
            if got.get(key, shape) != shape
        ],
    }
    report = "".join(f"\n  {title}: {shorten(entries)}" for title, entries in sections.items() if entries)
    if report:
        raise UserError(f"the adapters in {folder} do not fit the model's LoRA layers; inject others.{report}")


def _refuse_other_scale(config: Mapping[str, Any], layers: _Layers, folder: Path) -> None:
    for name, layer in layers.items():
        rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isclose(scaling, layer.scaling, rel_tol=1e-9):
            raise UserError(
                f"the adapters in {folder} scale {name} by {scaling:g}; the model's layer by {layer.scaling:g}. "
                f"Inject LoRA with rank = {layer.rank} and alpha = {scaling * layer.rank:g}."
            )


def _by_pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """The value of the first pattern that matches the end of a name, at a dot, as `peft` reads them."""
    matching = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matching, default)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a folder with {TENSORS_NAME} and {CONFIG_NAME}.")
    return path


def _commit(partial: Path, final: Path) -> None:
    """Bring a finished file to the disk and give it its name."""
    descriptor = os.open(partial, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.replace(final)
