"""Canonical, strict JSON: one value has one text, and no text is read that a careful writer would not have written."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

JsonValue: TypeAlias = bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None


def dump_json(value: JsonValue, *, indent: int | None = None) -> bytes:
    """The canonical UTF-8 text of a value: sorted keys, no spaces unless indented. Floats come back bit for bit.

    Args:
        value: What is written. Tuples come back as lists.
        indent: Spaces per level, for files that people read; `None` for the shortest text.

    Raises:
        ValueError: If a part of the value has no place in JSON, naming where it is.
    """
    _validate(value, "value")
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(
        value, sort_keys=True, separators=separators, indent=indent, allow_nan=False, ensure_ascii=False, default=dict
    )
    return text.encode()


def parse_json(data: bytes) -> JsonValue:
    """Read a JSON text.

    Raises:
        ValueError: If it is not valid, repeats a key, nests too deeply, or holds a number that is not finite.
    """
    try:
        value: JsonValue = _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("JSON nests too deeply.") from error
    return value


def _validate(value: object, where: str) -> None:
    match value:
        case None | bool() | int() | str():
            pass
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{where} = {value}; JSON holds finite numbers only.")
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{where} has the key {key!r} of type {type(key).__name__}; JSON keys are str.")
                _validate(item, f"{where}.{key}")
        case list() | tuple():
            for index, item in enumerate(value):
                _validate(item, f"{where}[{index}]")
        case _:
            raise ValueError(
                f"{where} is of type {type(value).__name__}; expected None, bool, int, float, str, list or dict."
            )


def _unique_pairs(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"JSON repeats the key {next(key for key in keys if keys.count(key) > 1)!r}.")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"JSON holds {text}, which is no finite number.")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
