"""Canonical JSON encoding and strict parsing: equal values give equal bytes, and malformed input is an error."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

JsonValue: TypeAlias = bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None

_SHOWN = 100  # characters of untrusted text in a message


def dump_json(value: JsonValue, *, indent: int | None = None) -> bytes:
    """Encode a value as canonical UTF-8 JSON: sorted keys, and no spaces without `indent`.

    `parse_json` restores floats bit for bit, and tuples as lists. Raises `ValueError` if a part of the value is not
    JSON, with the path of that part, or if the value contains itself.
    """
    try:
        _validate(value, "value")
    except RecursionError as error:
        raise ValueError("value nests too deeply for JSON, or contains itself.") from error
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(
        value, sort_keys=True, separators=separators, indent=indent, allow_nan=False, ensure_ascii=False, default=dict
    )
    return text.encode()


def parse_json(data: bytes) -> JsonValue:
    """Parse UTF-8 JSON; raise `ValueError` for invalid JSON, repeated keys, and non-finite or huge numbers."""
    try:
        value: JsonValue = _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("JSON nests too deeply.") from error
    return value


def as_object(value: JsonValue) -> dict[str, JsonValue]:
    """Return a parsed JSON object; raise `TypeError` for any other value."""
    if not isinstance(value, dict):
        raise TypeError(f"got {shortened(str(value))}; expected a JSON object.")
    return dict(value)


def as_list(value: JsonValue) -> list[JsonValue]:
    """Return a parsed JSON list; raise `TypeError` for any other value."""
    if not isinstance(value, list):
        raise TypeError(f"got {shortened(str(value))}; expected a list.")
    return value


def shortened(text: str) -> str:
    """Return the `repr` of an untrusted text for a message, truncated to 100 characters."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _validate(value: object, where: str) -> None:
    match value:
        case None | bool() | int() | str():
            pass
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{where} = {value}; expected a finite number, as JSON requires.")
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
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"JSON repeats the key {shortened(repeated)}.")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"JSON contains {shortened(text)}, which is not a finite number.")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"JSON contains {text}, which is not a finite number.")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_pairs, parse_float=_finite, parse_constant=_refuse_constant)
