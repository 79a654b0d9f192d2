"""What all sections of a configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
