"""Phases of a learning-rate schedule, each with a length and a curve."""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self, TypeAlias, final

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from d9d_dist import UserError
from d9d_loop.config.section import Section


class PhaseSettings(Section, ABC):
    """Base class of phases. The length is a number of steps or a percentage; with neither, the remaining steps."""

    steps: PositiveInt | None = Field(default=None, description="Length of the phase in steps.")
    percent: Annotated[float, Field(gt=0, le=100)] | None = Field(
        default=None,
        description="Length in percent of all steps of the job. A phase without steps and percent takes the remaining "
        "steps.",
    )

    @validator(mode="after")
    def _check_length(self) -> Self:
        if self.steps is not None and self.percent is not None:
            raise UserError(
                f"the phase has steps = {self.steps} and percent = {self.percent}; expected one of them, or neither."
            )
        return self

    @abstractmethod
    def end(self, start: float) -> float:
        """Return the factor at the end of the phase if the factor at its start is `start`."""

    @abstractmethod
    def value(self, start: float, progress: float) -> float:
        """Return the factor at a point of the phase: the learning rate relative to the peak.

        Args:
            start: Factor at the start of the phase.
            progress: Elapsed fraction of the phase, from 0 to 1; the factor at 1 is `end(start)`.
        """


class _Leading(PhaseSettings, ABC):
    """Phase that ends at the factor `to`; its curve is `start + (to - start) (1 - left(progress))`."""

    to: NonNegativeFloat = Field(description="Learning rate at the end of the phase, relative to the peak.")

    @final
    def end(self, start: float) -> float:
        return self.to

    @final
    def value(self, start: float, progress: float) -> float:
        left = self.left(progress)
        return left * start + (1.0 - left) * self.to

    @abstractmethod
    def left(self, progress: float) -> float:
        """Return the remaining fraction of the change, from 1 at progress 0 to 0 at progress 1."""


@final
class ConstantPhase(PhaseSettings):
    """Phase that keeps the final factor of the previous phase."""

    kind: Literal["constant"] = "constant"

    def end(self, start: float) -> float:
        """Return `start`."""
        return start

    def value(self, start: float, progress: float) -> float:
        """Return `start`."""
        return start


@final
class LinearPhase(_Leading):
    """Phase that changes the factor linearly to `to`."""

    kind: Literal["linear"] = "linear"

    def left(self, progress: float) -> float:
        """Return `1 - progress`."""
        return 1.0 - progress


@final
class CosinePhase(_Leading):
    """Phase that follows half a period of a cosine (Loshchilov, Hutter, arXiv:1608.03983, equation 5)."""

    kind: Literal["cosine"] = "cosine"

    def left(self, progress: float) -> float:
        """Return `(1 + cos(pi progress)) / 2`."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@final
class PolynomialPhase(_Leading):
    """Phase that follows a power of the remaining fraction `1 - progress`."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = Field(default=2.0, description="Exponent of the polynomial.")

    def left(self, progress: float) -> float:
        """Return `(1 - progress) ^ power`."""
        return (1.0 - progress) ** self.power


@final
class SqrtPhase(_Leading):
    """Phase that changes fast at first (Hägele et al., arXiv:2405.18392, "1-sqrt")."""

    kind: Literal["sqrt"] = "sqrt"

    def left(self, progress: float) -> float:
        """Return `1 - sqrt(progress)`."""
        return 1.0 - math.sqrt(progress)


@final
class RexPhase(_Leading):
    """Phase that changes slowly at first (Chen et al.: "REX: revisiting budgeted training", arXiv:2107.04197)."""

    kind: Literal["rex"] = "rex"

    def left(self, progress: float) -> float:
        """Return `(1 - progress) / (1 - progress / 2)`."""
        return (1.0 - progress) / (1.0 - progress / 2.0)


@final
class ExponentialPhase(PhaseSettings):
    """Phase that multiplies the factor by the same ratio in every step."""

    kind: Literal["exponential"] = "exponential"
    to: PositiveFloat = Field(description="Learning rate at the end of the phase, relative to the peak.")

    def end(self, start: float) -> float:
        """Return `to`. Raise `UserError` if `start` is 0, because 0 times any ratio stays 0."""
        if start == 0:
            raise UserError("an exponential phase starts at 0; expected a start above 0. Put a linear phase before it.")
        return self.to

    def value(self, start: float, progress: float) -> float:
        """Return `start (to / start) ^ progress`."""
        return start * (self.to / start) ** progress


Phase: TypeAlias = Annotated[
    ConstantPhase | LinearPhase | CosinePhase | PolynomialPhase | SqrtPhase | RexPhase | ExponentialPhase,
    Field(discriminator="kind"),
]
"""Any phase, selected by `kind`."""
