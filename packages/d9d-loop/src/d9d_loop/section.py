"""Base class of the sections of a configuration, and the default of their `kind`."""

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Section of a configuration: immutable; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def default_kind(kind: str) -> BeforeValidator:
    """Return a validator that sets `kind` of a section if it is missing."""
    return BeforeValidator(lambda value: {"kind": kind, **value} if isinstance(value, dict) else value)
