"""Reading a Hugging Face `config.json`: a missing, mistyped or unsupported entry is named, never guessed."""

import math
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from d9d_dist.errors import UserError

HuggingFaceConfig: TypeAlias = Mapping[str, object]
"""The parsed `config.json` of a checkpoint."""

T = TypeVar("T", int, float, bool)


def config_value(
    config: HuggingFaceConfig, key: str, kind: type[T], *, default: T | None = None, minimum: float | None = None
) -> T:
    """Read one number or flag of a configuration.

    Args:
        config: The parsed `config.json`.
        key: Name of the entry.
        kind: Type to expect; an integer is a float too.
        default: Stands for a missing entry; None if it may not be missing.
        minimum: Smallest number allowed; None allows finite numbers above 0.

    Raises:
        UserError: If the entry is missing without a default, of another type, or out of range.
    """
    value = config.get(key, default)
    if value is None:
        raise UserError(f"config.json has no {key!r}; expected a {kind.__name__}: is this the right checkpoint?")
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise UserError(f"config.json has {key} = {value!r}; expected a {kind.__name__}.")
    if kind is not bool:
        is_in_range = value > 0 if minimum is None else value >= minimum
        if not (is_in_range and math.isfinite(value)):
            bound = "above 0" if minimum is None else f"of at least {minimum}"
            raise UserError(f"config.json has {key} = {value!r}; expected a {kind.__name__} {bound}.")
    return value


def require_value(
    config: HuggingFaceConfig, key: str, supported: object, *, required: bool = False, where: str = "config.json"
) -> None:
    """Refuse a configuration that asks for what is not implemented.

    Args:
        config: The parsed `config.json`.
        key: Name of the entry.
        supported: The only value that is implemented.
        required: Whether the entry must be there; if not, a missing one counts as supported.
        where: What errors call the configuration.

    Raises:
        UserError: If the entry has another value, or a flag is a number.
    """
    if key not in config and not required:
        return
    value = config.get(key)
    if value != supported or isinstance(value, bool) is not isinstance(supported, bool):
        raise UserError(f"{where} has {key} = {value!r}; only {supported!r} is supported.")


def require_known_keys(
    config: HuggingFaceConfig, *, used: Collection[str], irrelevant: Mapping[str, str], where: str = "config.json"
) -> None:
    """Refuse a configuration with an entry that would be dropped.

    Args:
        config: The parsed `config.json`, or one object of it.
        used: Entries that the caller reads.
        irrelevant: Entries that do not change the model, each with the reason.
        where: What errors call the configuration.

    Raises:
        UserError: Naming every other entry.
    """
    unknown = {key: value for key, value in config.items() if key not in used and key not in irrelevant}
    if unknown:
        entries = ", ".join(f"{key} = {value!r}" for key, value in unknown.items())
        raise UserError(
            f"{where} has {entries}; expected only entries whose effect on the model is known. Delete an entry from "
            "the mapping before you pass it if the model does not depend on that entry."
        )


@contextmanager
def config_keys_in_errors(keys: Mapping[str, str]) -> Generator[None]:
    """Name the entries of a `config.json` in errors about the sizes that were read from it.

    Args:
        keys: Entry by the field that it became, where the names differ.

    Raises:
        UserError: The error of the body, with the entries of the fields that it mentions.
    """
    try:
        yield
    except UserError as error:
        named = [
            f"{field} is {key}"
            for field, key in keys.items()
            if field != key and re.search(rf"\b{field}\b", str(error))
        ]
        if not named:
            raise
        raise UserError(f"{error} In config.json {', '.join(named)}.") from error
