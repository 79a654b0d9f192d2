"""Generators of the `--help` page and of the documentation's table from a configuration class."""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from d9d_dist import UserError
from d9d_loop.config._config_keys import Key, arms_of, keys_of, kind_of, sections_of


def describe_fields(model: type[BaseModel], *, section: str = "") -> str:
    """Return the `--help` page: an overview of all keys by section, or the details of one section.

    The overview has a line for each key of the default kind of each section. The details have the keys of all kinds
    and of list items, with all descriptions.

    Args:
        model: Configuration class.
        section: Name of a section or of a key, such as `optimizer` or `optimizer.groups`; empty for the overview.

    Raises:
        UserError: If there is no such section.
    """
    entries = _entries(model)
    if section:
        return "\n".join(_details(entries, section))
    groups: dict[str, list[str]] = {"": []}
    for name, variants in entries.items():
        shown = variants[0]
        group, _, key = name.rpartition(".")
        if "[]" in name or not _is_of_default_kind(group, shown, entries):
            continue
        default = "required" if shown.default is None else f"= {shown.default}"
        types = _types(variants) if key == "kind" else _shortened(_types(variants[:1]), 30)
        description = shown.description.partition(". ")[0].rstrip(".")
        line = f"  {key:<22} {types} {_shortened(default, 24)}".rstrip()
        groups.setdefault(group, []).append(f"{line}  {description}".rstrip())
    lines = ["usage: [FILE] [--section.key VALUE ...]", "       --help SECTION for all keys, kinds and descriptions"]
    for group, keys in groups.items():
        lines += ["", *([f"[{group}]"] if group else []), *keys]
    return "\n".join(lines)


def _details(entries: dict[str, list[Key]], section: str) -> list[str]:
    """Return a line for each key of a section with its types and defaults, followed by its descriptions."""
    chosen = {
        name: each
        for name, each in entries.items()
        if name == section or name.startswith((f"{section}.", f"{section}["))
    }
    if not chosen:
        known = sorted({name.partition(".")[0] for name in entries})
        close = difflib.get_close_matches(section, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}."
        raise UserError(f"--help {section}: no such section; {hint}")
    lines: list[str] = []
    for name, variants in chosen.items():
        lines.append(f"  --{name} {_types(variants)} ({_defaults(variants)}){_only_for(variants)}")
        lines += [f"        {description}" for description in _descriptions(variants)]
    return lines


def _is_of_default_kind(group: str, key: Key, entries: dict[str, list[Key]]) -> bool:
    """Return True if a key belongs to the first kind of its section, which is the default."""
    kinds = entries.get(f"{group}.kind", [])
    return not key.kind or not kinds or key.kind == kinds[0].kind


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _entries(model: type[BaseModel]) -> dict[str, list[Key]]:
    """Return, by dotted name, all keys that are not sections, each with one variant per kind that declares it."""
    entries: dict[str, list[Key]] = {}
    for name, variant in _walk(model, "", "", ()):
        entries.setdefault(name, []).append(variant)
    return entries


def _walk(section: type, prefix: str, kind: str, above: tuple[type, ...]) -> Iterator[tuple[str, Key]]:
    for key in keys_of(section):
        name, sections = f"{prefix}{key.name}", sections_of(key.annotation)
        if not sections:
            yield name, replace(key, kind=kind)
            items = [below for arm in arms_of(key.annotation) for part in get_args(arm) for below in sections_of(part)]
            sections, name = items, f"{name}[]"
        for below in sections:
            if below not in (*above, section):  # no endless recursion: an optimizer group may contain an optimizer
                yield from _walk(below, f"{name}.", kind_of(below) if len(sections) > 1 else kind, (*above, section))


def _only_for(variants: list[Key]) -> str:
    kinds = [variant.kind for variant in variants if variant.kind]
    is_kind_itself = variants[0].name == "kind"
    return f" [{', '.join(dict.fromkeys(kinds))}]" if kinds and not is_kind_itself else ""


def _types(variants: list[Key]) -> str:
    return " | ".join(dict.fromkeys(name for variant in variants for name in _type_names(variant.annotation)))


def _defaults(variants: list[Key]) -> str:
    found: dict[str | None, list[str]] = {}
    for variant in variants:
        found.setdefault(variant.default, []).append(variant.kind)
    if len(found) == 1:
        (default,) = found
        return "required" if default is None else f"default {default}"
    if variants[0].name == "kind":
        return f"default {variants[0].default}"
    return "default " + "; ".join(f"{default} for {', '.join(kinds)}" for default, kinds in found.items())


def _descriptions(variants: list[Key]) -> list[str]:
    return list(dict.fromkeys(variant.description for variant in variants if variant.description))


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
