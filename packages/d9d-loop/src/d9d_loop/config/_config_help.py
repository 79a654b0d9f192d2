"""Generators of the `--help` page and of the documentation's table from a configuration class."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from d9d_loop.config._config_keys import Key, arms_of, keys_of, sections_of


@dataclass(frozen=True, slots=True)
class _Variant:
    """Declaration of a key by one kind of its section; `kind` is empty if the section has a single kind."""

    kind: str
    key: Key


def describe_fields(model: type[BaseModel]) -> str:
    """Return the `--help` page: for each key, a line with type and default, then its descriptions."""
    lines = ["usage: [FILE] [--section.key VALUE ...]", ""]
    for name, variants in _entries(model).items():
        lines.append(f"  --{name} {_types(variants)} ({_defaults(variants)}){_only_for(variants)}")
        lines += [f"        {description}" for description in _descriptions(variants)]
    return "\n".join(lines)


def tabulate_fields(model: type[BaseModel], *, without: type[BaseModel] | None = None) -> str:
    """Return a Markdown table of the keys, except those of `without`, with type, default and description.

    Keys of the items of a list are written as `list[].key`.
    """
    known = {} if without is None else _entries(without)
    lines = ["| Key | Type | Default | What it is for |", "|---|---|---|---|"]
    for name, variants in _entries(model).items():
        if name not in known:
            what = " ".join([*_descriptions(variants), _only_for(variants).strip()]).strip()
            types = " or ".join(f"`{each}`" for each in _types(variants).split(" | "))
            cells = [f"`{name}`", types, _defaults(variants).removeprefix("default "), what]
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    return "\n".join(lines)


def _entries(model: type[BaseModel]) -> dict[str, list[_Variant]]:
    """Return all keys that are not sections by dotted name, each with one variant per kind that declares it."""
    entries: dict[str, list[_Variant]] = {}
    for name, variant in _walk(model, "", "", ()):
        entries.setdefault(name, []).append(variant)
    return entries


def _walk(section: type, prefix: str, kind: str, above: tuple[type, ...]) -> Iterator[tuple[str, _Variant]]:
    for key in keys_of(section):
        name, sections = f"{prefix}{key.name}", sections_of(key.annotation)
        if not sections:
            yield name, _Variant(kind, key)
            items = [below for arm in arms_of(key.annotation) for part in get_args(arm) for below in sections_of(part)]
            sections, name = items, f"{name}[]"
        for below in sections:
            if below not in (*above, section):  # no endless recursion: an optimizer group may contain an optimizer
                yield from _walk(below, f"{name}.", _kind(below) if len(sections) > 1 else kind, (*above, section))


def _kind(section: type) -> str:
    """Return the value of a section's discriminator `kind`, or its class name if it has none."""
    literals = [key for key in keys_of(section) if get_origin(key.annotation) is Literal and key.name == "kind"]
    return str(get_args(literals[0].annotation)[0]) if literals else section.__name__


def _only_for(variants: list[_Variant]) -> str:
    kinds = [variant.kind for variant in variants if variant.kind]
    is_kind_itself = variants[0].key.name == "kind"
    return f" [{', '.join(dict.fromkeys(kinds))}]" if kinds and not is_kind_itself else ""


def _types(variants: list[_Variant]) -> str:
    return " | ".join(dict.fromkeys(name for variant in variants for name in _type_names(variant.key.annotation)))


def _defaults(variants: list[_Variant]) -> str:
    found: dict[str | None, list[str]] = {}
    for variant in variants:
        found.setdefault(variant.key.default, []).append(variant.kind)
    if len(found) == 1:
        (default,) = found
        return "required" if default is None else f"default {default}"
    if variants[0].key.name == "kind":
        return f"default {variants[0].key.default}"
    return "default " + "; ".join(f"{default} for {', '.join(kinds)}" for default, kinds in found.items())


def _descriptions(variants: list[_Variant]) -> list[str]:
    return list(dict.fromkeys(variant.key.description for variant in variants if variant.key.description))


def _type_names(annotation: Any) -> list[str]:
    return [_arm_name(arm) for arm in arms_of(annotation)]


def _arm_name(arm: Any) -> str:
    if arm is NoneType:
        return "null"
    if get_origin(arm) is Literal:
        return " | ".join(map(str, get_args(arm)))
    if get_origin(arm) in (tuple, list):
        parts = ["..." if part is Ellipsis else " | ".join(_type_names(part)) for part in get_args(arm)]
        return f"[{', '.join(parts)}]"
    return arm.__name__ if isinstance(arm, type) and not get_args(arm) else str(arm)
