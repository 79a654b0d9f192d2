"""Conversion of pydantic validation errors to messages: the value, the expected value and how to change it."""

import difflib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from d9d_loop.config._config_keys import Place, all_keys, locate, sections_of

_NAMES = tomllib.loads(files("d9d_loop.config").joinpath("other_trainers.toml").read_text(encoding="utf-8"))
_WITHOUT_OURS = frozenset(_NAMES.pop("none"))
"""Names of settings in other trainers for which we have no key, although a key of ours has a similar name."""
OTHER_NAMES = {other: ours for ours, others in _NAMES.items() for other in others}
"""Our dotted key for the name of a setting in another trainer. A configuration class may lack the key."""


def explain(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return one message per validation error, without duplicates."""
    return list(dict.fromkeys(_explain(model, details) for details in error.errors()))


def _explain(model: type[BaseModel], details: ErrorDetails) -> str:
    place = locate(model, details["loc"])
    name = ".".join(map(str, place.keys))
    match details["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return _explain_unknown(model, name, [key.name for key in place.siblings])
        case "missing":
            return _explain_missing(name, [key.name for key in place.below if key.default is None])
        case "union_tag_not_found" | "union_tag_invalid":
            context = details.get("ctx", {})
            return f"{name}.{_explain_choice(place, context)}. {_advice([*place.keys, _discriminator(context)])}"
        case "value_error" | "assertion_error":
            message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            return f"{name}{': ' if name else ''}{message}{'' if message.endswith('.') else '.'}"
        case _:
            return f"{name} = {_shown(details['input'])}; {_expected(details['msg'])}. {_advice(place.keys)}"


def _explain_unknown(model: type[BaseModel], name: str, siblings: Sequence[str]) -> str:
    section = name.rpartition(".")[0]
    if close := _closest(model, name, siblings):
        return f"{name} is not a configuration key; did you mean {' or '.join(close)}?"
    if name in (key.name for key in all_keys(model)):
        return f"{name} is a key of another kind of [{section}]; this kind has {', '.join(sorted(siblings))}."
    place = f"[{section}] has" if section else "there are"
    return f"{name} is not a configuration key; {place} {', '.join(sorted(siblings))}."


def _closest(model: type[BaseModel], name: str, siblings: Sequence[str]) -> list[str]:
    """Return the full names to suggest for an unknown key.

    The suggestion is our key for a name of another trainer, or the most similar key of the same section. If no key is
    similar, all keys of this name in other sections are suggested, or else the most similar full name. There is no
    suggestion if another kind of the section has the key, or we have no key for a name of another trainer.
    """
    section, dot, key = name.rpartition(".")
    ours = OTHER_NAMES.get(key.lower().replace("-", "_"))
    if ours is not None and ours != name and any(other.name == ours for other in all_keys(model)):
        return [ours]
    if key in _WITHOUT_OURS:
        return []
    if close := difflib.get_close_matches(key, siblings, n=1):
        return [f"{section}{dot}{close[0]}"]
    known = list(dict.fromkeys(other.name for other in all_keys(model) if not sections_of(other.annotation)))
    if name in known:
        return []  # another kind of this section has the key
    return [other for other in known if other.rpartition(".")[2] == key] or difflib.get_close_matches(name, known, n=1)


def _explain_missing(name: str, required_below: Sequence[str]) -> str:
    names = [f"{name}.{key}" for key in required_below] or [name]
    verb, options = ("is", "it") if len(names) == 1 else ("are", "them")
    arguments = " ".join(f"--{missing} VALUE" for missing in names)
    return f"{' and '.join(names)} {verb} missing; set {options} in the configuration file, or with {arguments}."


def _explain_choice(place: Place, context: Mapping[str, str]) -> str:
    """Return the message about a missing or invalid discriminator of a union, usually `kind`."""
    key = _discriminator(context)
    expected = ", ".join(repr(tag) for other in place.below if other.name == key for tag in get_args(other.annotation))
    got = f"= {context['tag']!r}" if "tag" in context else "is missing"
    return f"{key} {got}; expected one of {expected}"


def _discriminator(context: Mapping[str, str]) -> str:
    return context["discriminator"].strip("'")


def _expected(message: str) -> str:
    expected = message.replace("Input should be", "expected", 1)
    return re.sub(r"^expected (greater|less)", r"expected a number \1", expected)


def _advice(keys: Sequence[str | int]) -> str:
    """Return advice on how to set a key. For a key inside a list, the advice is to set the list."""
    names = itertools.takewhile(lambda key: isinstance(key, str), keys)
    return f"Change it in the configuration file, or with --{'.'.join(map(str, names))} VALUE."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
