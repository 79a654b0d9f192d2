"""What was trained of a model, from files that `save_adapters` or Hugging Face `peft` wrote, into its place."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_peft._consensus import agree, exchange
from d9d_peft._sharded import fill
from d9d_peft._targets import shorten
from d9d_peft.peft_config import (
    config_low_rank,
    read_config,
    refuse_other_modules,
    refuse_other_scale,
    refuse_other_targets,
    refuse_untargeted_layer,
)
from d9d_peft.peft_layout import CONFIG_NAME, TENSORS_NAME
from d9d_peft.stored_adapters import StoredAdapters, StoredNames, agreed_adapters, base_names, stored_names
from d9d_state import StateMapper


def load_adapters(
    model: nn.Module,
    folder: str | Path,
    base_mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
) -> None:
    """Fill the adapters of a model from a folder that `save_adapters` or Hugging Face `peft` wrote, in place.

    Each rank reads for itself and keeps its shards. Collective if `ctx` is given, and for DoRA, which measures the rows
    of sharded weights.

    Args:
        model: Materialised and, for DoRA, loaded, with the adapters that the files are of. The whole model, or this
            rank's pipeline stages of it.
        folder: Where `adapter_model.safetensors` and `adapter_config.json` are.
        base_mapper: As for `save_adapters`.
        ctx: The ranks, which then refuse files together. Needed for pipeline stages, of which none has all that the
            files hold; `None` for a process on its own.

    Raises:
        UserError: If the files are of other layers, another rank or scale, or another kind of adapters; nothing is
            changed then.
    """
    folder = Path(folder)
    stored, is_dora = agreed_adapters(model, base_mapper, ctx)
    everywhere = StoredNames.union(exchange(stored_names(stored), ctx))
    base = base_names(model, base_mapper)
    agree(_problem(lambda: _check(folder, stored, everywhere, base, is_dora=is_dora)), ctx)
    with safe_open(folder / TENSORS_NAME, framework="pt") as file:
        for adapted in (*stored.layers, *stored.parameters):
            adapted.fill(file.get_tensor)
        for tensors in stored.modules.values():
            for key, tensor in tensors.items():
                fill(tensor, file.get_tensor(key))


def _check(
    folder: Path, stored: StoredAdapters, everywhere: StoredNames, base: Collection[str], *, is_dora: bool
) -> None:
    """Refuse files that are not those of the model's adapters.

    Args:
        folder: Folder of the files.
        stored: Adapters of this rank.
        everywhere: Names of the adapters of all ranks.
        base: Names of the tensors of the base checkpoint.
        is_dora: The kind of the adapters.

    Raises:
        UserError: With all that does not fit.
    """
    origin = str(folder / CONFIG_NAME)
    config = read_config(_existing(folder / CONFIG_NAME).read_text(encoding="utf-8"), origin=origin, is_dora=is_dora)
    try:
        with safe_open(_existing(folder / TENSORS_NAME), framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
            refuse_other_targets(config, everywhere.parameters, everywhere.layers, origin=origin)
            ranks = {each.name: config_low_rank(config, each.name).rank for each in stored.parameters}
            expected = stored.shapes()
            for parameter in stored.parameters:
                expected |= parameter.shapes(ranks[parameter.name])
            _refuse_mismatch(shapes, expected, everywhere.tensors, folder)
            for parameter in stored.parameters:
                stored_low_rank = parameter.stored_low_rank(ranks[parameter.name])
                refuse_other_scale(config, parameter.name, stored_low_rank, origin=origin)
                parameter.check_values(file.get_tensor, ranks[parameter.name])
    except SafetensorError as error:
        raise UserError(f"{folder / TENSORS_NAME} is no safetensors file: {error}.") from error
    for layer in stored.layers:
        for name in layer.names:
            refuse_other_scale(config, name, layer.low_rank, origin=origin)
            refuse_untargeted_layer(config, name, origin=origin)
    refuse_other_modules(config, everywhere.trained, base, origin=origin)


def _refuse_mismatch(
    got: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    everywhere: Collection[str],
    folder: Path,
) -> None:
    sections = {
        "in the folder, but not in the model": [key for key in got if key not in everywhere],
        "in the model, but not in the folder": [key for key in expected if key not in got],
        "of another shape": [
            f"{key}: got {list(got[key])}, expected {list(shape)}"
            for key, shape in expected.items()
            if got.get(key, shape) != shape
        ],
    }
    report = "".join(f"\n  {title}: {shorten(entries)}" for title, entries in sections.items() if entries)
    if report:
        raise UserError(f"the adapters in {folder} do not fit those of the model; inject others.{report}")


def _problem(check: Callable[[], None]) -> str | None:
    """What a check has to say."""
    try:
        check()
    except (UserError, OSError) as error:
        return str(error)
    return None


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a folder with {TENSORS_NAME} and {CONFIG_NAME}.")
    return path
