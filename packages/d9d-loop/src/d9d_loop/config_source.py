"""Reads a configuration from a file and the command line, and explains everything that is wrong with it at once."""

import difflib
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from d9d_dist import UserError
from d9d_loop._config_help import describe_fields, field_names

M = TypeVar("M", bound=BaseModel)


def parse_command_line(model: type[M], default_file: str | Path | None, arguments: Sequence[str] | None) -> M:
    """Read `[FILE] [--section.key VALUE ...]` into a configuration; `--help` prints every field and exits.

    Args:
        model: The class of the configuration.
        default_file: The file to read where the command line names none.
        arguments: The command line; that of this process by default.

    Raises:
        UserError: If the file or a field is wrong.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(describe_fields(model))
        raise SystemExit(0)
    file, overrides = _split(words)
    source = default_file if file is None else file
    values = {} if source is None else read_config_file(source)
    for key, text in overrides:
        _override(values, key, text)
    return validate_config(model, values)


def read_config_file(file: str | Path) -> dict[str, Any]:
    """Read a `.toml` or `.json` file.

    Raises:
        UserError: If it is not there, of another kind, or not well formed.
    """
    path = Path(file)
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"configuration file {path}: expected a .toml or .json file.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {path} cannot be read: {error}. Check the path.") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise UserError(f"configuration file {path} is not well formed: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"configuration file {path} holds {type(values).__name__}; expected sections and keys.")
    return values


def validate_config(model: type[M], values: Mapping[str, Any]) -> M:
    """Check values against a configuration's class.

    Raises:
        UserError: Listing everything that is wrong: the field, what was got, what was expected; for an unknown key, the
            closest one that there is.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = list(dict.fromkeys(_explain(model, details) for details in error.errors()))
        raise UserError("\n     ".join(lines)) from None


def _split(words: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Separate the configuration file from the overrides `--key value` and `--key=value`."""
    file: str | None = None
    overrides: list[tuple[str, str]] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            value = text if equals else next(rest, None)
            if value is None or (not equals and value.startswith("--")):
                raise UserError(f"--{key} has no value; expected --{key} VALUE.")
            overrides.append((key, value))
        elif file is None:
            file = word
        else:
            raise UserError(
                f"got the arguments {file!r} and {word!r}; expected one configuration file, then --key VALUE."
            )
    return file, overrides


def _override(values: dict[str, Any], key: str, text: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        below = values.setdefault(section, {})
        if not isinstance(below, dict):
            raise UserError(f"--{key}: {section} is a value, not a section.")
        values = below
    values[name] = _parse_value(text)


def _parse_value(text: str) -> Any:
    """Lists, tables and null by their syntax; all else stays text, which the field's type makes sense of."""
    if text == "null":
        return None
    if text[:1] in "[{" and text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text


def _explain(model: type[BaseModel], details: ErrorDetails) -> str:
    place = [str(part) for part in details["loc"]]
    name = ".".join(_without_choices(model, place))
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _explain_unknown(model, name)
    if details["type"] == "missing":
        return f"{name} is missing; set it in the configuration file, or with --{name} VALUE."
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if details["type"] in ("value_error", "assertion_error"):
        return f"{name}: {message}{'' if message.endswith('.') else '.'}"
    expected = message.replace("Input should be", "expected", 1)
    return (
        f"{name} = {_shown(details['input'])}; {expected}. Change it in the configuration file, or with --{name} VALUE."
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain_unknown(model: type[BaseModel], name: str) -> str:
    known = field_names(model)
    section, _, key = name.rpartition(".")
    siblings = [other.removeprefix(f"{section}.") for other in known if other.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, siblings, n=1) or difflib.get_close_matches(name, known, n=1)
    if close:
        suggestion = close[0] if "." in close[0] or not section else f"{section}.{close[0]}"
        return f"{name} is not a configuration key; did you mean {suggestion}?"
    place = f"[{section}] has" if section else "there are"
    return f"{name} is not a configuration key; {place} {', '.join(sorted(siblings))}."


def _without_choices(model: type[BaseModel], place: Sequence[str]) -> Iterator[str]:
    """Drop what pydantic puts into a location besides keys: the tag of the union member that it tried."""
    known = {part for name in field_names(model) for part in name.split(".")}
    for position, part in enumerate(place):
        follows_choice = position > 0 and part in _tags(model, place[0])
        if part in known or not follows_choice:
            yield part


def _tags(model: type[BaseModel], field: str) -> set[str]:
    annotation = model.model_fields[field].annotation if field in model.model_fields else None
    members = [annotation, *get_args(annotation)]
    return {
        str(tag)
        for member in members
        if isinstance(member, type) and issubclass(member, BaseModel) and "kind" in member.model_fields
        for tag in get_args(member.model_fields["kind"].annotation)
    }
