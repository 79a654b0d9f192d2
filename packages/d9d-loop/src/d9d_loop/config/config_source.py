"""Configuration from a file and the command line, with errors that list every invalid key."""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from d9d_dist import UserError
from d9d_loop.config._config_errors import explain
from d9d_loop.config._config_help import describe_fields
from d9d_loop.config._config_keys import sections_of
from d9d_loop.config.config_file import merge, read_config_file

M = TypeVar("M", bound=BaseModel)


def parse_command_line(model: type[M], default_file: str | Path | None, arguments: Sequence[str] | None) -> M:
    """Parse the command line `[FILE] [--section.key VALUE ...]` to a configuration.

    `--help` prints an overview of the keys and exits; `--help SECTION` prints the details of one section and exits;
    `--schema` prints the JSON Schema of configuration files and exits. `JobConfig.from_cli` documents the arguments
    and errors.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for flag in ("--help", "-h"):
        if flag in words:
            after = words[words.index(flag) + 1 :]
            print(describe_fields(model, section=after[0] if after and not Path(after[0]).suffix else ""))
            raise SystemExit(0)
    if "--schema" in words:
        print(json.dumps(file_schema(model), indent=2))
        raise SystemExit(0)
    file, overrides = split_words(words)
    source = default_file if file is None else file
    values = {} if source is None else read_config_file(source)
    over: dict[str, Any] = {}
    for key, text in overrides:
        _override(over, key, text, values)
    return validate_config(model, merge(_with_default_kinds(values, over, model), over))


def _with_default_kinds(values: Mapping[str, Any], over: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Add the default `kind` to sections of the file that omit it, if the command line sets their `kind`.

    `merge` then replaces the section if the kinds differ, instead of mixing keys of both kinds.
    """
    named = dict(values)
    for key, field in model.model_fields.items():
        section, above = named.get(key), over.get(key)
        if not (isinstance(section, dict) and isinstance(above, dict) and isinstance(field.default, BaseModel)):
            continue
        if len(sections_of(field.annotation)) > 1:
            default = field.default.model_dump(include={"kind"}) if "kind" in above else {}
            named[key] = {**default, **section}
        else:
            named[key] = _with_default_kinds(section, above, type(field.default))
    return named


def validate_config(model: type[M], values: Mapping[str, Any]) -> M:
    """Validate values; the `UserError` lists every invalid key with its value and the expected value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError("\n     ".join(explain(model, error))) from None


def file_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of configuration files.

    No top-level key is required, because included files and the command line may supply it.
    """
    schema = _replace_one_of(model.model_json_schema())
    schema.pop("required", None)
    include = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Configuration files to include; keys of this file override theirs.",
    }
    schema["properties"] = {"$schema": {"type": "string"}, "include": include, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _replace_one_of(schema: Any) -> Any:
    """Replace `oneOf` with `anyOf`: a section that omits `kind` may match several members of a union."""
    if isinstance(schema, list):
        return [_replace_one_of(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {"anyOf" if key == "oneOf" else key: _replace_one_of(value) for key, value in schema.items()}


def split_words(words: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Split arguments into the configuration file, if any, and the overrides `--key value` and `--key=value`."""
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


def _override(over: dict[str, Any], key: str, text: str, values: Any) -> None:
    """Set a dotted key in the overrides `over`. Raise `UserError` if its section is a value there or in `values`."""
    *sections, name = key.split(".")
    for section in sections:
        over, values = over.setdefault(section, {}), values.get(section, {})
        if not (isinstance(over, dict) and isinstance(values, dict)):
            raise UserError(f"--{key}: {section} is a value, not a section.")
    over[name] = _parse_value(text)


def _parse_value(text: str) -> Any:
    """Parse `null`, and lists and tables in TOML or JSON. Other values stay text, which pydantic converts."""
    if text == "null":
        return None
    if text.startswith(("[", "{")):
        for parse in (lambda text: tomllib.loads(f"value = {text}")["value"], json.loads):
            with suppress(ValueError):
                return parse(text)
    return text
