"""Makes of a configuration's class the page that `--help` prints."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from d9d_loop._config_keys import all_keys, arms_of, sections_of


def describe_fields(model: type[BaseModel]) -> str:
    """One line for each key, with its type and default, and one with what it is for."""
    lines = ["usage: [FILE] [--section.key VALUE ...]", ""]
    for key in all_keys(model):
        if not sections_of(key.annotation):
            default = "required" if key.default is None else f"default {key.default}"
            lines.append(f"  --{key.name} {_type_name(key.annotation)} ({default})")
            if key.description:
                lines.append(f"        {key.description}")
    return "\n".join(lines)


def _type_name(annotation: Any) -> str:
    return " | ".join(_arm_name(arm) for arm in arms_of(annotation))


def _arm_name(arm: Any) -> str:
    if arm is NoneType:
        return "null"
    if get_origin(arm) is Literal:
        return " | ".join(map(str, get_args(arm)))
    if get_origin(arm) in (tuple, list):
        return f"[{', '.join('...' if part is Ellipsis else _type_name(part) for part in get_args(arm))}]"
    return arm.__name__ if isinstance(arm, type) and not get_args(arm) else str(arm)
