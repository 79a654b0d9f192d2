"""Phases of a learning-rate schedule, each with a length and a curve, and their composition."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Literal, Self, TypeAlias, final

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from d9d_dist import UserError
from d9d_loop.section import Section


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
        left = self._left(progress)
        return left * start + (1.0 - left) * self.to

    @abstractmethod
    def _left(self, progress: float) -> float:
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

    def _left(self, progress: float) -> float:
        return 1.0 - progress


@final
class CosinePhase(_Leading):
    """Phase that follows half a period of a cosine (Loshchilov, Hutter, arXiv:1608.03983, equation 5)."""

    kind: Literal["cosine"] = "cosine"

    def _left(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@final
class PolynomialPhase(_Leading):
    """Phase that follows a power of the remaining fraction `1 - progress`."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = Field(default=2.0, description="Exponent of the polynomial.")

    def _left(self, progress: float) -> float:
        return (1.0 - progress) ** self.power


@final
class SqrtPhase(_Leading):
    """Phase that changes fast at first (Hägele et al., arXiv:2405.18392, "1-sqrt")."""

    kind: Literal["sqrt"] = "sqrt"

    def _left(self, progress: float) -> float:
        return 1.0 - math.sqrt(progress)


@final
class RexPhase(_Leading):
    """Phase that changes slowly at first (Chen et al.: "REX: revisiting budgeted training", arXiv:2107.04197)."""

    kind: Literal["rex"] = "rex"

    def _left(self, progress: float) -> float:
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


def piecewise(phases: Sequence[PhaseSettings], *, num_steps: int, start: float | None = None) -> Callable[[int], float]:
    """Compose phases into a function of the step, counted from 0, that returns the learning rate relative to the peak.

    On its first step, each phase has the final factor of the previous phase. A last phase of several steps reaches its
    final factor on the last step of the job, and keeps it afterwards. If `start` is 0, the first phase begins one step
    before the job, because a step with learning rate 0 would have no effect.

    Args:
        phases: One or more phases. Lengths in percent are rounded such that their sum is off by at most half a step.
        num_steps: Number of steps of the whole job.
        start: Learning rate at the start of the first phase, relative to the peak. `None`: 0 if the first phase leads
            to the peak, as a warm-up does; otherwise the peak.

    Raises:
        UserError: If the phases cover fewer or more than `num_steps` steps, several have no length, or an exponential
            phase starts at 0. Also if the learning rate is 0 in every step, or `start` is `None` and may be either
            value.
    """
    ends = _ends(phases, num_steps)
    start = _default_start(phases) if start is None else start
    begins = [0, *ends[:-1]]
    values = list(accumulate(phases, lambda value, phase: phase.end(value), initial=start))
    if not any(values):
        raise UserError(
            "the learning rate is 0 in every step: start = 0, and no phase leads to more; expected a positive rate. "
            "Use start = 1, or a first phase that leads to 1."
        )
    early = 1 if start == 0 else 0

    def factor(step: int) -> float:
        index = min(bisect_right(ends, step), len(phases) - 1)
        is_first, is_last = index == 0, index == len(phases) - 1
        done = step - begins[index] + early * is_first
        length = max(ends[index] - begins[index] + early * is_first - is_last, 1)
        return phases[index].value(values[index], min(done / length, 1.0))

    return factor


def _default_start(phases: Sequence[PhaseSettings]) -> float:
    """Return 0 if the first phase is a warm-up to the peak, else 1; raise `UserError` if neither is evident."""
    _, first, *later = accumulate(phases, lambda value, phase: phase.end(value), initial=1.0)
    if max([first, *later]) > first:
        raise UserError(
            f"start is missing, and the first phase ends at {first:g}, below a later phase; expected start = 0 for a "
            "warm-up, or start = 1 to begin at the peak."
        )
    return 0.0 if first >= 1 and not isinstance(phases[0], ConstantPhase) else 1.0


def _ends(phases: Sequence[PhaseSettings], num_steps: int) -> list[int]:
    """Return the end of each phase: one more than the index of its last step."""
    open_phases = [index for index, phase in enumerate(phases) if phase.steps is None and phase.percent is None]
    if not phases or len(open_phases) > 1:
        raise UserError(
            f"the schedule has {len(phases)} phases, {len(open_phases)} of them with neither steps nor percent; "
            "expected at least one phase, and at most one without a length. Set a length for the others."
        )
    percents = math.fsum(phase.percent for phase in phases if phase.percent is not None)
    if percents > 100 * (1 + 1e-9):
        raise UserError(
            f"the phases of the schedule take {percents:g} percent of the job; expected at most 100. Shorten a phase."
        )
    lengths = _lengths(phases, num_steps)
    left = num_steps - sum(lengths)
    if left < 0 or bool(open_phases) == (left == 0):
        expected = "fewer, because one phase takes the remaining steps" if open_phases else num_steps
        remedy = "Omit the length of one phase, which then takes the remaining steps" if left > 0 else "Shorten a phase"
        raise UserError(
            f"the phases of the schedule take {sum(lengths)} steps, but the job has {num_steps}; expected {expected}. "
            f"{remedy}."
        )
    for index in open_phases:
        lengths[index] = left
    return list(accumulate(lengths))


def _lengths(phases: Sequence[PhaseSettings], num_steps: int) -> list[int]:
    """Return the length of each phase in steps; 0 for a phase without a length.

    The cumulative percentages are rounded to steps, so that rounding errors do not add up.
    """
    lengths: list[int] = []
    percent = 0.0
    for phase in phases:
        if phase.percent is not None:
            before, percent = percent, percent + phase.percent
            lengths.append(round(num_steps * percent / 100) - round(num_steps * before / 100))
        else:
            lengths.append(phase.steps or 0)
    return lengths
