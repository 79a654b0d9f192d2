"""Load adapter files of `save_adapters` or Hugging Face `peft` into a model."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError, agree, copy_from_full_
from d9d_dist.errors import shorten
from d9d_peft.adapter import DEFAULT_ADAPTER
from d9d_peft.peft_config import (
    config_low_rank,
    read_config,
    refuse_other_modules,
    refuse_other_scale,
    refuse_other_targets,
    refuse_untargeted_layer,
)
from d9d_peft.peft_layout import CONFIG_NAME, TENSORS_NAME
from d9d_peft.stored_adapters import StoredAdapters, StoredNames, agreed_adapters, base_names, gather_names
from d9d_state import StateMapper
from d9d_state.module_tensors import aliases


def load_adapters(
    model: nn.Module,
    folder: str | Path,
    base_mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
    *,
    adapter: str = DEFAULT_ADAPTER,
) -> None:
    """Load adapters from a folder that `save_adapters` or Hugging Face `peft` wrote, in place.

    Each rank reads the files and keeps its shards. Collective over the job if `ctx` is given, and for DoRA with sharded
    weights, whose row norms are summed over ranks.

    Args:
        model: The whole model, or this rank's pipeline stages of it; materialized, with injected adapters, and for DoRA
            with loaded weights.
        folder: Folder with `adapter_model.safetensors` and `adapter_config.json`.
        base_mapper: As in `save_adapters`.
        ctx: Distributed context; all ranks then raise together. Required for pipeline stages, which hold only a part of
            the adapters. `None` for a single process.
        adapter: Name of the adapters to load, as passed to `inject`.

    Raises:
        UserError: If layers, rank, scale or kind of the adapters differ between files and model, or an entry of the
            configuration is not supported. The model is then unchanged.
    """
    folder = Path(folder)
    stored, is_dora = agreed_adapters(model, base_mapper, ctx, adapter)
    all_names, problem = gather_names(stored, ctx), None
    try:
        _check(folder, stored, all_names, base_names(model, base_mapper), is_dora=is_dora)
    except (UserError, OSError) as error:
        problem = UserError(str(error))
    agree(problem, alone=ctx is None)
    with safe_open(folder / TENSORS_NAME, framework="pt") as file:
        for adapted in (*stored.layers, *stored.parameters):
            adapted.fill(file.get_tensor)
        for tensors in stored.modules.values():
            for key, tensor in tensors.items():
                copy_from_full_(tensor, file.get_tensor(key))


def _check(
    folder: Path, stored: StoredAdapters, all_names: StoredNames, base: Collection[str], *, is_dora: bool
) -> None:
    """Raise `UserError` if the files are missing or unreadable, or do not match the adapters of this rank (`stored`).

    `all_names` holds the names of the adapters of all ranks, `base` the tensor names of the base checkpoint.
    """
    origin = str(folder / CONFIG_NAME)
    config = read_config(_existing(folder / CONFIG_NAME).read_text(encoding="utf-8"), origin=origin, is_dora=is_dora)
    try:
        with safe_open(_existing(folder / TENSORS_NAME), framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
            refuse_other_targets(config, all_names.parameters, all_names.layers, origin=origin)
            ranks = {each.name: config_low_rank(config, each.name).rank for each in stored.parameters}
            expected = stored.shapes()
            for parameter in stored.parameters:
                expected |= parameter.shapes(ranks[parameter.name])
            _refuse_mismatch(shapes, expected, all_names.tensors, folder)
            for parameter in stored.parameters:
                stored_low_rank = parameter.stored_low_rank(ranks[parameter.name])
                refuse_other_scale(config, parameter.name, stored_low_rank, origin=origin)
                parameter.check_values(file.get_tensor, ranks[parameter.name])
            _refuse_untied(stored, file.get_tensor, folder)
    except SafetensorError as error:
        raise UserError(
            f"{folder / TENSORS_NAME} is not a valid safetensors file: {error}. Save or download it again."
        ) from error
    for layer in stored.layers:
        for name in layer.names:
            refuse_other_scale(config, name, layer.adapter.low_rank, origin=origin)
            refuse_untargeted_layer(config, name, origin=origin)
    refuse_other_modules(config, all_names.trained, base, origin=origin)


def _refuse_untied(stored: StoredAdapters, read: Callable[[str], Tensor], folder: Path) -> None:
    """Raise `UserError` if the files have different values for a parameter that the model ties."""
    of_modules = {key: tensor for tensors in stored.modules.values() for key, tensor in tensors.items()}
    for key, first in aliases(of_modules).items():
        if first != key and not torch.equal(read(first), read(key)):
            raise UserError(
                f"the adapters in {folder} have different values of {first} and {key}, which the model ties; expected "
                "equal values. Load them into an untied model (tie_word_embeddings = false)."
            )


def _refuse_mismatch(
    got: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    all_names: Collection[str],
    folder: Path,
) -> None:
    sections = {
        "in the folder, but not in the model": [key for key in got if key not in all_names],
        "in the model, but not in the folder": [key for key in expected if key not in got],
        "of another shape": [
            f"{key}: got {list(got[key])}, expected {list(shape)}"
            for key, shape in expected.items()
            if got.get(key, shape) != shape
        ],
    }
    report = "".join(f"\n  {title}: {shorten(entries)}" for title, entries in sections.items() if entries)
    if report:
        raise UserError(
            f"the adapters in {folder} do not match the adapters of the model; inject matching ones.{report}"
        )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a folder with {TENSORS_NAME} and {CONFIG_NAME}.")
    return path
