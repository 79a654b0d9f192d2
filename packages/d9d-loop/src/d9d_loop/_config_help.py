"""Makes text of a configuration's class: the names of its keys, and the page that `--help` prints."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def field_names(model: type) -> list[str]:
    """The dotted name of every section and key."""
    return [name for name, _, _, _ in _walk(model, "")]


def describe_fields(model: type[BaseModel]) -> str:
    """One line for each key: name, type, default, and what it is for."""
    lines = ["usage: [FILE] [--section.key VALUE ...]", ""]
    for name, annotation, default, description in _walk(model, ""):
        if not _sections(annotation):
            lines.append(f"  --{name} {_type_name(annotation)} ({default})")
            if description:
                lines.append(f"        {description}")
    return "\n".join(lines)


def _walk(model: type, prefix: str) -> Iterator[tuple[str, Any, str, str]]:
    """Name, type, default and description of every field, sections before their fields."""
    for name, annotation, default, description in _fields(model):
        yield f"{prefix}{name}", annotation, default, description
        for section in _sections(annotation):
            yield from _walk(section, f"{prefix}{name}.")


def _fields(model: type) -> Iterator[tuple[str, Any, str, str]]:
    if issubclass(model, BaseModel):
        for name, info in model.model_fields.items():
            yield name, info.annotation, _default_of(info), info.description or ""
    else:
        for field in dataclasses.fields(model):  # ty: ignore[invalid-argument-type]  (a section is one or the other)
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            yield field.name, field.type, "required" if required else f"default {field.default}", ""


def _default_of(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=False)
    return "required" if default is PydanticUndefined else f"default {'null' if default is None else default}"


def _sections(annotation: Any) -> list[type]:
    """The classes whose fields are keys below this one: several where a section comes in several kinds."""
    candidates = [annotation, *get_args(annotation)]
    return [
        candidate
        for candidate in candidates
        if isinstance(candidate, type) and (issubclass(candidate, BaseModel) or dataclasses.is_dataclass(candidate))
    ]


def _type_name(annotation: Any) -> str:
    arguments = [_type_name(part) for part in get_args(annotation) if part is not Ellipsis and isinstance(part, type)]
    if isinstance(annotation, type) and not arguments:
        return "null" if annotation is type(None) else annotation.__name__
    return " | ".join(arguments) or str(annotation).removeprefix("typing.")
