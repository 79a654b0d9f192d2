"""Checkpoints of transformers, Accelerate, Lightning and torch's DCP, by the names of the weights on disk."""

import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from d9d_dist import UserError, canonical_name
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_state import read_model_state


class ForeignCheckpoint(NamedTuple):
    """Weights of a checkpoint, state and group values of the optimizer by parameter, and number of steps, if known."""

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    step: int | None


def read_foreign(
    path: Path, names: Collection[str], model: nn.Module, build: OptimizerProvider | None
) -> ForeignCheckpoint:
    """Read a folder, or a file of Lightning; see `Trainer.import_checkpoint`.

    `names` are those of the weights on disk, which may have a prefix in the checkpoint. `model` is the job's whole
    model, and `build` builds the optimizer of the checkpoint. Raises `UserError` if the checkpoint has not the state of
    one optimizer, or names, counts or shapes do not fit.
    """
    files = dict(_read(path))
    found = list(_walk(files))
    optimizers = [_unflatten(value) for _, value in found if isinstance(value, dict)]
    if len(optimizers) != 1:
        raise UserError(
            f"{path} has the state of {len(optimizers)} optimizers; expected one, in a checkpoint of transformers, "
            "Accelerate, Lightning or torch. Weights alone are initial_weights."
        )
    weights = _name_weights([each for each in found if isinstance(each[1], Tensor)], names, path)
    groups, state = optimizers[0]["param_groups"], optimizers[0]["state"]
    called = [_strip(each, names) for group in groups for each in group.get("param_names", group["params"])]
    if any(isinstance(each, int) for each in called):
        sizes, members = [len(group["params"]) for group in groups], _members(path, names, model, build)
        if sizes != [len(each) for each in members]:
            raise UserError(
                f"the optimizer of {path} has groups of {sizes} parameters, but expected "
                f"{[len(each) for each in members]}. Freeze the same parameters, and pass optimizer=, a function of "
                "the model that builds the optimizer of the checkpoint, if it has groups."
            )
        called = [name for each in members for name in each]
    values = dict(zip(called, [group for group in groups for _ in group["params"]], strict=True))
    numbers = [str(each) for group in groups for each in group["params"]]  # DCP converts numbers in keys to text
    given = {name: state[own] for own, name in zip(numbers, called, strict=True) if own in state}
    states = {name: {key: each for key, each in kept.items() if each is not None} for name, kept in given.items()}
    counted = max((int(kept["step"]) for kept in states.values() if "step" in kept), default=None)
    step = next((file["global_step"] for file in files.values() if "global_step" in file), counted)
    return ForeignCheckpoint(weights, states, values, step)


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each file or folder of DCP, and its content as nested dicts."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a checkpoint of another library.")
    for folder in sorted(each.parent for each in path.glob("**/.metadata")):
        with tempfile.TemporaryDirectory() as copy:
            dcp_to_torch_save(folder, Path(copy) / "all.pt")
            yield folder.name, torch.load(Path(copy) / "all.pt", weights_only=False)  # written here
    if any(path.glob("*.safetensors")):
        yield "weights", dict(read_model_state(path, progress=False))
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.name == "trainer_state.json":
            yield file.name, json.loads(file.read_text())
        elif file.suffix == ".ckpt" or file.name.startswith(("pytorch_model", "optimizer.", "meta.pt")):
            try:
                yield file.name, torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # of pickle, which differ between versions of torch
                raise UserError(f"{file} has objects that weights_only=True does not read: {error}") from None


def _walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tensors and the states of optimizers of nested dicts and lists, each with its path."""
    items = list(enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ())
    if isinstance(tree, Tensor) or any(str(key).startswith("param_groups") for key, _ in items):
        yield path, tree
    else:
        for key, value in items:
            yield from _walk(value, (*path, str(key)))


def _unflatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with its keys as text; torchtitan flattens them."""
    if "param_groups" in tree:
        return {**tree, "state": {str(key): value for key, value in tree["state"].items()}}
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in tree.items():
        (kind, _, rest), last = key.rpartition(".")[0].partition("."), key.rpartition(".")[2]
        parts[kind].setdefault(rest, {})[last] = value
    return {**parts, "param_groups": [{**group, "params": [name]} for name, group in parts["param_groups"].items()]}


def _strip(name: Any, names: Collection[str]) -> Any:
    """Return a name without its prefix, such as `model.` or `_orig_mod.`; unknown names and numbers as they are."""
    parts = str(name).split(".")
    return next((each for start in range(len(parts)) if (each := ".".join(parts[start:])) in names), name)


def _name_weights(found: list[tuple[tuple[str, ...], Tensor]], names: Collection[str], path: Path) -> dict[str, Tensor]:
    """Return the weights by name; check that the dicts that have them have no other tensors."""
    named = [(where[:-1], _strip(where[-1], names), each) for where, each in found]
    folders = {where for where, name, _ in named if name in names}
    weights: dict[str, Tensor] = {}
    for where, name, each in named:
        if where in folders and (name not in names or name in weights):
            reason = "twice" if name in weights else "which the model lacks"
            raise UserError(f"{path} has {name}, {reason}; expected the weights of the model alone.")
        weights |= {name: each} if where in folders else {}
    return weights


def _members(path: Path, names: Collection[str], model: nn.Module, build: OptimizerProvider | None) -> list[list[str]]:
    """Return the names of the parameters of each group of an optimizer that numbers them."""
    is_trainer = (path / "trainer_state.json").is_file()
    if is_trainer and any(canonical_name(name) not in names for name, _ in model.named_parameters()):
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
    trained = {canonical_name(name): each for name, each in model.named_parameters() if each.requires_grad}
    if build is not None:
        called = {id(each): name for name, each in trained.items()}
        return [[called[id(each)] for each in group["params"]] for group in build(model).param_groups]
    if not is_trainer:
        return [list(trained)]
    from transformers import Trainer

    decayed: Any = Trainer.get_decay_parameter_names(None, model)  # ty: ignore[invalid-argument-type]
    return [[name for name in trained if (name in decayed) == decays] for decays in (True, False)]
