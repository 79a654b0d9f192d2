"""What an optimizer keeps that is no tensor: counters of a parameter, and what it changes in its own groups."""

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import UserError
from d9d_state.checkpoint.tensors import named_parameters
from d9d_state.json_value import JsonValue

GroupValues: TypeAlias = list[dict[str, JsonValue]]
"""For each group of an optimizer what it is set to, and what it keeps there."""


def group_values(optimizer: Optimizer) -> GroupValues:
    """What each group of an optimizer holds besides its parameters, as JSON. A tensor of one value counts as a number.

    Take it when the optimizer is new, for `optimizer_numbers` to see what changed.

    Raises:
        ValueError: If a group holds something else than numbers, texts, sequences of them, and `None`.
    """
    return [
        {
            key: _plain(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]", value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def optimizer_numbers(
    model: nn.Module, optimizer: Optimizer, *, since: GroupValues | None = None, without: Collection[str] = ()
) -> JsonValue:
    """The numbers that an optimizer keeps, to be saved as JSON on every rank.

    Args:
        model: Whose parameters the optimizer updates.
        optimizer: The optimizer.
        since: What `group_values` gave when it was new: then only what changed since is state, and the rest is
            configuration, which may be another one after a restart. `None` saves all values of all groups.
        without: Values of groups that somebody else sets after a restart, as a schedule sets `lr`.

    Raises:
        ValueError: If it keeps what is no JSON, or updates a tensor that is no parameter of the model.
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
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, bool | int | float)
        }
        if numbers:
            kept[name] = {key: _plain(f"{key} of {name}", value) for key, value in numbers.items()}
    return {"parameters": kept, "groups": groups}


def set_optimizer_numbers(model: nn.Module, optimizer: Optimizer, saved: list[JsonValue]) -> None:
    """Give an optimizer its numbers back, after `prepare_optimizer_for_load`.

    Args:
        model: Whose parameters the optimizer updates.
        optimizer: Of the class that was saved.
        saved: What `optimizer_numbers` gave on each rank that saved; stages of a pipeline have different parameters.

    Raises:
        UserError: If that is not what `optimizer_numbers` gave.
    """
    try:
        numbers: dict[str, Any] = {}
        values_of: dict[str, Any] = {}
        for each in map(_fields, saved):
            numbers.update(_fields(each["parameters"]))
            for group in map(_fields, _items(each["groups"])):
                values_of.update(dict.fromkeys(map(str, _items(group["parameters"])), group["values"]))
        _set_numbers(model, optimizer, numbers, values_of)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"got numbers of an optimizer that cannot be restored ({error}); expected what optimizer_numbers() gave."
        ) from error


def _set_numbers(
    model: nn.Module, optimizer: Optimizer, numbers: Mapping[str, JsonValue], values_of: Mapping[str, JsonValue]
) -> None:
    names: dict[int, str] = {}
    for name, parameter, _ in named_parameters(model, optimizer):
        names[id(parameter)] = name
        for key, value in _fields(numbers.get(name, {})).items():
            optimizer.state[parameter][key] = _from_plain(value)
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        saved = next((values_of[name] for name in members if name in values_of), {})
        for key, value in _fields(saved).items():
            group[key] = _like(group.get(key), _from_plain(value))


def _like(current: object, value: Any) -> Any:
    """A value from JSON in the type that the group holds."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    return tuple(value) if isinstance(current, tuple) else value


def _plain(where: str, value: object) -> JsonValue:
    match value:
        case float() if not math.isfinite(value):
            return {"float": repr(value)}  # JSON knows no infinity
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.ndim == 0:
            return _plain(where, value.item())
        case list() | tuple():
            return [_plain(where, item) for item in value]
    raise ValueError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold; expected numbers and texts."
    )


def _from_plain(value: JsonValue) -> Any:
    match value:
        case {"float": str() as text}:
            return float(text)
        case list():
            return [_from_plain(item) for item in value]
    return value


def _fields(value: JsonValue) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return dict(value)


def _items(value: JsonValue) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value
