"""Non-tensor optimizer state: numbers per parameter, and values that the optimizer changes in its parameter groups."""

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import UserError
from d9d_state.checkpoint.tensors import named_parameters
from d9d_state.json_value import JsonValue, as_list, as_object

GroupValues: TypeAlias = list[dict[str, JsonValue]]
"""Values of each parameter group: hyperparameters, and state that the optimizer stores in the group."""


def group_values(optimizer: Optimizer) -> GroupValues:
    """Return the values of each parameter group, without its parameters, as JSON. Scalar tensors become numbers.

    Pass the result for a new optimizer as `since` to `non_tensor_optimizer_state` to save only changed values.

    Raises:
        ValueError: If a value is not a number, a string, `None`, or a sequence of these.
    """
    return [
        {
            key: _plain(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]", value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def non_tensor_optimizer_state(
    model: nn.Module, optimizer: Optimizer, *, since: GroupValues | None = None, without: Collection[str] = ()
) -> JsonValue:
    """Return an optimizer's non-tensor state as JSON, to be saved on every rank.

    `since` is the result of `group_values` for the newly created optimizer. Only group values that changed since then
    are saved; unchanged values are configuration, which may differ after a restart. `None` saves all group values.
    `without` has keys to omit because other code sets them after a restart, such as `lr` with a learning rate schedule.

    Raises:
        ValueError: If a value is not JSON, or the optimizer updates a tensor that is not a parameter of the model.
    """
    named = named_parameters(model, optimizer)
    names = {id(parameter): name for name, parameter, _ in named}
    groups: list[JsonValue] = []
    for index, values in enumerate(group_values(optimizer)):
        changed = {
            key: value
            for key, value in values.items()
            if key not in without and (since is None or key not in since[index] or since[index][key] != value)
        }
        if changed:
            members = [names[id(parameter)] for parameter in optimizer.param_groups[index]["params"]]
            groups.append({"parameters": members, "values": changed})
    kept: dict[str, JsonValue] = {}
    for name, parameter, _ in named:
        numbers = {
            key: _plain(f"{key} of {name}", value)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, bool | int | float)
        }
        if numbers:
            kept[name] = numbers
    return {"parameters": kept, "groups": groups}


def set_non_tensor_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: list[JsonValue]) -> None:
    """Restore an optimizer's non-tensor state in place. Call it after `prepare_optimizer_for_load`.

    `saved` has the results of `non_tensor_optimizer_state` of all ranks that saved, since pipeline stages have
    different parameters. Raises `UserError` for anything else.
    """
    try:
        numbers: dict[str, Any] = {}
        values_of: dict[str, Any] = {}
        for each in map(as_object, saved):
            numbers.update(as_object(each["parameters"]))
            for group in map(as_object, as_list(each["groups"])):
                values_of.update(dict.fromkeys(map(str, as_list(group["parameters"])), group["values"]))
        _set_numbers(model, optimizer, numbers, values_of)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"got an invalid non-tensor optimizer state ({error}); expected results of non_tensor_optimizer_state()."
        ) from error


def _set_numbers(
    model: nn.Module, optimizer: Optimizer, numbers: Mapping[str, JsonValue], values_of: Mapping[str, JsonValue]
) -> None:
    names: dict[int, str] = {}
    for name, parameter, _ in named_parameters(model, optimizer):
        names[id(parameter)] = name
        for key, value in as_object(numbers.get(name, {})).items():
            optimizer.state[parameter][key] = _from_plain(value)
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        saved = next((values_of[name] for name in members if name in values_of), {})
        for key, value in as_object(saved).items():
            group[key] = _like(group.get(key), _from_plain(value))


def _like(current: object, value: Any) -> Any:
    """Convert a JSON value to the type of the group's current value; a current tensor is filled in place."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    return tuple(value) if isinstance(current, tuple) else value


def _plain(where: str, value: object) -> JsonValue:
    match value:
        case float() if not math.isfinite(value):
            return {"float": repr(value)}  # JSON cannot represent infinity or NaN
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.ndim == 0:
            return _plain(where, value.item())
        case list() | tuple():
            return [_plain(where, item) for item in value]
    raise ValueError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot store; expected numbers, strings, None, "
        "or sequences of these."
    )


def _from_plain(value: JsonValue) -> Any:
    match value:
        case {"float": str() as text}:
            return float(text)
        case list():
            return [_from_plain(item) for item in value]
    return value
