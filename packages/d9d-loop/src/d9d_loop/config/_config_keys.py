"""Introspection of configuration classes: their keys, and the key that a pydantic error location refers to."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a configuration.

    Attributes:
        name: Name of the field; `all_keys` prefixes it with the names of the enclosing sections, separated by dots.
        default: Default as text: a string as is, other values as JSON, "computed" for a default factory. `None` if the
            key is required.
        kind: Kind of the section that declares the key; empty if the section has a single kind.
    """

    name: str
    annotation: Any
    default: str | None
    description: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Position in a configuration that a pydantic error location refers to.

    Attributes:
        keys: Keys and list indices of the path, without the labels of union members that pydantic inserts.
        siblings: Keys of the section that contains, or should contain, the last key.
        below: Keys of the section that the last key names; empty if the last key is not a section.
    """

    keys: tuple[str | int, ...]
    siblings: tuple[Key, ...]
    below: tuple[Key, ...]


def all_keys(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key with its dotted name, sections before their keys. Sections within lists are omitted."""
    for key in keys_of(section):
        yield dataclasses.replace(key, name=f"{prefix}{key.name}")
        for below in sections_of(key.annotation):
            yield from all_keys(below, f"{prefix}{key.name}.")


def keys_of(section: type) -> list[Key]:
    """Return the keys of one section, a pydantic model or a dataclass."""
    described = _attribute_descriptions(section)
    if issubclass(section, BaseModel):
        return [
            Key(name, field.annotation, _default(field), field.description or described.get(name, ""))
            for name, field in section.model_fields.items()
        ]
    assert dataclasses.is_dataclass(section)
    fields = dataclasses.fields(section)
    return [Key(field.name, field.type, _default(field), described.get(field.name, "")) for field in fields]


def _attribute_descriptions(section: type) -> dict[str, str]:
    """Return the descriptions of fields under `Attributes:` in the docstrings of a class and its base classes."""
    described: dict[str, str] = {}
    for base in reversed(section.__mro__):
        _, _, text = (inspect.cleandoc(base.__dict__.get("__doc__") or "")).partition("Attributes:\n")
        text = re.split(r"\n(?=\S)", text)[0]  # up to the next section
        for name, description in re.findall(r"^ {4}(\w+): ((?:.|\n {5,})*)", text, re.MULTILINE):
            described[name] = " ".join(description.split())
    return described


def sections_of(annotation: Any) -> list[type]:
    """Return the section classes in an annotation: several if the section has several kinds, none for a plain value."""
    return [arm for arm in arms_of(annotation) if _is_section(arm)]


def kind_of(section: type) -> str:
    """Return the value of a section's discriminator `kind`, or its class name if it has none."""
    literals = [key for key in keys_of(section) if get_origin(key.annotation) is Literal and key.name == "kind"]
    return str(get_args(literals[0].annotation)[0]) if literals else section.__name__


def kinds_of(annotation: Any) -> dict[str, type]:
    """Return the sections of a union, by their `kind`."""
    return {kind_of(section): section for section in sections_of(annotation)}


def arms_of(annotation: Any) -> list[Any]:
    """Return the members of a union, flattened; for any other type, a list with only this type."""
    if get_origin(annotation) is Annotated:
        return arms_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for part in get_args(annotation) for arm in arms_of(part)]
    return [annotation]


def locate(model: type, location: Sequence[str | int]) -> Place:
    """Resolve a pydantic error location in a configuration class."""
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
    """Return the labels of a union member in pydantic locations: its class name and the values of its literal keys."""
    if not isinstance(arm, type):
        return []
    literals = [key for key in keys_of(arm) if get_origin(key.annotation) is Literal] if _is_section(arm) else []
    return [arm.__name__, *(str(value) for key in literals for value in get_args(key.annotation))]


def _is_section(arm: Any) -> bool:
    # A parametrized generic such as list[int] may pass as a type, but it has no fields.
    return isinstance(arm, type) and not get_args(arm) and (issubclass(arm, BaseModel) or dataclasses.is_dataclass(arm))


def _default(field: FieldInfo | dataclasses.Field[Any]) -> str | None:
    if field.default_factory not in (None, dataclasses.MISSING):
        return "computed"
    if field.default in (PydanticUndefined, dataclasses.MISSING):
        return None
    value = to_jsonable_python(field.default)
    return value if isinstance(value, str) else json.dumps(value)
