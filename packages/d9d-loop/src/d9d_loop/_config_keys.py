"""Looks into a configuration's class: which keys there are, and which of them a pydantic error is about."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration.

    Attributes:
        name: Its name, dotted where it was asked for with what is above it.
        annotation: The type of its value.
        default: Its default as one would type it; `None` if the key is required.
        description: What it is for.
    """

    name: str
    annotation: Any
    default: str | None
    description: str


@dataclass(frozen=True, slots=True)
class Place:
    """What a pydantic location points to.

    Attributes:
        keys: The keys and list positions on the way, without the names that pydantic puts between them to say which
            member of a union it tried.
        siblings: The keys of the section that the last key is, or should be, in.
        below: The keys of the section that the last key stands for, if it does.
    """

    keys: tuple[str | int, ...]
    siblings: tuple[Key, ...]
    below: tuple[Key, ...]


def all_keys(section: type, prefix: str = "") -> Iterator[Key]:
    """Every key with its dotted name, sections before what is in them; not those of sections in lists."""
    for key in keys_of(section):
        yield dataclasses.replace(key, name=f"{prefix}{key.name}")
        for below in sections_of(key.annotation):
            yield from all_keys(below, f"{prefix}{key.name}.")


def keys_of(section: type) -> list[Key]:
    """The keys of one section, which is a pydantic model or a dataclass."""
    if issubclass(section, BaseModel):
        fields = section.model_fields.items()
        return [Key(name, field.annotation, _default(field), field.description or "") for name, field in fields]
    assert dataclasses.is_dataclass(section)
    return [Key(field.name, field.type, _default(field), "") for field in dataclasses.fields(section)]


def sections_of(annotation: Any) -> list[type]:
    """The classes whose fields are keys below this one: several where a section comes in several kinds."""
    return [arm for arm in arms_of(annotation) if _is_section(arm)]


def arms_of(annotation: Any) -> list[Any]:
    """The members of a union; of any other type, itself."""
    if get_origin(annotation) is Annotated:
        return arms_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for part in get_args(annotation) for arm in arms_of(part)]
    return [annotation]


def locate(model: type, location: Sequence[str | int]) -> Place:
    """Follow a pydantic location through the types of a configuration."""
    keys: list[str | int] = []
    siblings: list[Key] = []
    arms: list[Any] = [model]
    for part in location:
        chosen = [arm for arm in arms if part in _labels(arm)]
        if chosen and sum(arm is not NoneType for arm in arms) > 1:
            arms = chosen
            continue
        keys.append(part)
        siblings = [key for arm in arms if _is_section(arm) for key in keys_of(arm)]
        found = [arm for key in siblings if key.name == part for arm in arms_of(key.annotation)]
        arms = found or [arm for outer in arms for inner in get_args(outer) for arm in arms_of(inner)]
    below = [key for arm in arms if _is_section(arm) for key in keys_of(arm)]
    return Place(tuple(keys), tuple(siblings), tuple(below))


def _labels(arm: Any) -> list[str]:
    """What pydantic calls a member of a union: its class, or the value of the key that tells the members apart."""
    if not isinstance(arm, type):
        return []
    literals = [key for key in keys_of(arm) if get_origin(key.annotation) is Literal] if _is_section(arm) else []
    return [arm.__name__, *(str(value) for key in literals for value in get_args(key.annotation))]


def _is_section(arm: Any) -> bool:
    # A parametrised generic such as list[int] passes for a class in some places, but has no fields.
    return isinstance(arm, type) and not get_args(arm) and (issubclass(arm, BaseModel) or dataclasses.is_dataclass(arm))


def _default(field: FieldInfo | dataclasses.Field[Any]) -> str | None:
    if field.default_factory not in (None, dataclasses.MISSING):
        return "computed"
    if field.default in (PydanticUndefined, dataclasses.MISSING):
        return None
    value = to_jsonable_python(field.default)
    return value if isinstance(value, str) else json.dumps(value)
