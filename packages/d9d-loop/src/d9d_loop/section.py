"""Base class of the sections of a configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Section of a configuration: immutable; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
