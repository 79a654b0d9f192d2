"""The phases of a learning-rate schedule: how long each is, and by which curve it gets from one value to another."""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self, TypeAlias, final

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from d9d_dist import UserError
from d9d_loop.section import Section


class PhaseSettings(Section, ABC):
    """How long a phase is: a number of steps, a part of the job, or, with neither, what the others leave."""

    steps: PositiveInt | None = Field(None, description="Its length in steps.")
    percent: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="Its length as a part of all steps of the job; neither this nor steps: what is left."
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
        """The factor that a phase leads to which starts from another one."""

    @abstractmethod
    def value(self, start: float, progress: float) -> float:
        """The factor of the peak learning rate.

        Args:
            start: The factor at the start of the phase.
            progress: From 0 to 1, at which it is `end(start)`.
        """


class _Leading(PhaseSettings, ABC):
    """A phase that leads to a value of its own, `start + (to - start) (1 - left(progress))`."""

    to: NonNegativeFloat = Field(description="Factor of the peak learning rate that it leads to.")

    @final
    def end(self, start: float) -> float:
        """What it leads to."""
        return self.to

    @final
    def value(self, start: float, progress: float) -> float:
        """See `PhaseSettings.value`."""
        left = self.left(progress)
        return left * start + (1.0 - left) * self.to

    @abstractmethod
    def left(self, progress: float) -> float:
        """The part of the way that is left: 1 at a progress of 0, and 0 at 1."""


@final
class ConstantPhase(PhaseSettings):
    """Stays where it starts."""

    kind: Literal["constant"] = "constant"

    def end(self, start: float) -> float:
        """The start."""
        return start

    def value(self, start: float, progress: float) -> float:
        """The start."""
        return start


@final
class LinearPhase(_Leading):
    """A straight line."""

    kind: Literal["linear"] = "linear"

    def left(self, progress: float) -> float:
        """`1 - progress`."""
        return 1.0 - progress


@final
class CosinePhase(_Leading):
    """Half a cosine (Loshchilov, Hutter, arXiv:1608.03983, equation 5)."""

    kind: Literal["cosine"] = "cosine"

    def left(self, progress: float) -> float:
        """`(1 + cos(pi progress)) / 2`."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@final
class PolynomialPhase(_Leading):
    """A power of what is left of the phase."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = Field(2.0, description="The power.")

    def left(self, progress: float) -> float:
        """`(1 - progress) ^ power`."""
        return (1.0 - progress) ** self.power


@final
class SqrtPhase(_Leading):
    """Falls fast at first (Hägele et al., arXiv:2405.18392, "1-sqrt")."""

    kind: Literal["sqrt"] = "sqrt"

    def left(self, progress: float) -> float:
        """`1 - sqrt(progress)`."""
        return 1.0 - math.sqrt(progress)


@final
class RexPhase(_Leading):
    """Falls slowly at first (Chen et al.: "REX: revisiting budgeted training", arXiv:2107.04197)."""

    kind: Literal["rex"] = "rex"

    def left(self, progress: float) -> float:
        """`(1 - progress) / (1 - progress / 2)`."""
        return (1.0 - progress) / (1.0 - progress / 2.0)


@final
class ExponentialPhase(PhaseSettings):
    """The same factor from each step to the next."""

    kind: Literal["exponential"] = "exponential"
    to: PositiveFloat = Field(description="Factor of the peak learning rate that it leads to.")

    def end(self, start: float) -> float:
        """What it leads to.

        Raises:
            UserError: If it starts at 0, from where no factor leads anywhere.
        """
        if start == 0:
            raise UserError(
                "an exponential phase starts at 0; expected a number above 0. Put a linear phase before it."
            )
        return self.to

    def value(self, start: float, progress: float) -> float:
        """`start (to / start) ^ progress`."""
        return start * (self.to / start) ** progress


Phase: TypeAlias = Annotated[
    ConstantPhase | LinearPhase | CosinePhase | PolynomialPhase | SqrtPhase | RexPhase | ExponentialPhase,
    Field(discriminator="kind"),
]
"""Any phase, told apart by `kind`."""
