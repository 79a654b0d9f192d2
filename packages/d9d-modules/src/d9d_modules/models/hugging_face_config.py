"""Reading a Hugging Face `config.json`: a missing, mistyped or unsupported entry is named, never guessed."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from d9d_dist.errors import UserError

HuggingFaceConfig: TypeAlias = Mapping[str, object]
"""The parsed `config.json` of a checkpoint."""

T = TypeVar("T", int, float, bool)


def config_value(config: HuggingFaceConfig, key: str, kind: type[T], *, default: T | None = None) -> T:
    """One number or flag of a configuration.

    Args:
        config: The parsed `config.json`.
        key: Name of the entry.
        kind: Type to expect; an integer is a float too.
        default: Stands for a missing entry; None if it may not be missing.

    Raises:
        UserError: If the entry is missing without a default, or of another type.
    """
    value = config.get(key, default)
    if value is None:
        raise UserError(f"config.json has no {key!r}; expected a {kind.__name__}: is this the right checkpoint?")
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise UserError(f"config.json has {key} = {value!r}; expected a {kind.__name__}.")
    return value


def require_value(config: HuggingFaceConfig, key: str, supported: object, *, required: bool = False) -> None:
    """Refuse a configuration that asks for what is not implemented.

    Args:
        config: The parsed `config.json`.
        key: Name of the entry.
        supported: The only value that is implemented.
        required: Whether the entry must be there; if not, a missing one counts as supported.

    Raises:
        UserError: If the entry has another value.
    """
    if key not in config and not required:
        return
    value = config.get(key)
    if value != supported:
        raise UserError(f"config.json has {key} = {value!r}; only {supported!r} is supported.")
