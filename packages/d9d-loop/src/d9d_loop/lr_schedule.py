"""Learning-rate schedules: pure functions of the step, so that a resumed job needs no state of theirs."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, final

from pydantic import BeforeValidator, Field, NonNegativeFloat

from d9d_dist import UserError
from d9d_loop.schedules.phase import ConstantPhase, CosinePhase, LinearPhase, Phase, SqrtPhase
from d9d_loop.schedules.piecewise import piecewise
from d9d_loop.section import Section

LrSchedule = Callable[[int], float]
"""The factor of the peak learning rate for a step, counted from 0."""


@final
class WarmupCosineConfig(Section):
    """Linear warm-up, then half a cosine (Loshchilov, Hutter, arXiv:1608.03983) down to a fraction of the peak."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup_steps: int = Field(0, ge=0, description="Steps until the peak; 0 starts at the peak.")
    final_fraction: float = Field(0.1, ge=0, le=1, description="Fraction of the peak at the last step.")

    def build(self, num_steps: int) -> LrSchedule:
        """The schedule of a job of so many steps.

        Step s of the warm-up has the factor (s + 1) / (warmup_steps + 1), so that the first step is not lost.
        """
        decay = CosinePhase(to=self.final_fraction)
        if self.warmup_steps == 0:
            return piecewise([decay], num_steps=num_steps, start=1.0)
        warmup = LinearPhase(steps=self.warmup_steps, to=1.0)
        # A job may end before its warm-up does.
        return piecewise([warmup, decay], num_steps=max(num_steps, self.warmup_steps + 1))


_CURVES = MappingProxyType({"linear": LinearPhase, "cosine": CosinePhase, "sqrt": SqrtPhase})


@final
class WsdConfig(Section):
    """Warm-up, stable, decay (Hu et al., arXiv:2404.06395): only the decay has to know where the job ends."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: int = Field(0, ge=0, description="Steps until the peak; 0 starts at the peak.")
    decay_percent: float = Field(20.0, gt=0, le=100, description="Part of the job, at its end, that decays.")
    decay: Literal["linear", "cosine", "sqrt"] = Field("sqrt", description="By which curve.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="Fraction of the peak at the last step.")

    def build(self, num_steps: int) -> LrSchedule:
        """The schedule of a job of so many steps.

        Raises:
            UserError: If warm-up and decay leave no step between them.
        """
        decay = _CURVES[self.decay](percent=self.decay_percent, to=self.final_fraction)
        if self.warmup_steps == 0:
            return piecewise([ConstantPhase(), decay], num_steps=num_steps, start=1.0)
        warmup = LinearPhase(steps=self.warmup_steps, to=1.0)
        return piecewise([warmup, ConstantPhase(), decay], num_steps=num_steps)


@final
class PiecewiseConfig(Section):
    """Phases, one after the other, each of which starts where the one before ends."""

    kind: Literal["piecewise"] = "piecewise"
    start: NonNegativeFloat = Field(0.0, description="Factor of the peak learning rate on the first step.")
    phases: tuple[Phase, ...] = Field(min_length=1, description="What happens, in order; one may leave its length out.")

    def build(self, num_steps: int) -> LrSchedule:
        """The schedule of a job of so many steps.

        Raises:
            UserError: If the phases leave a gap, or take more steps than there are.
        """
        try:
            return piecewise(self.phases, num_steps=num_steps, start=self.start)
        except UserError as error:
            raise UserError(f"lr_schedule.phases: {error}") from None


def _with_kind(value: Any) -> Any:
    """Warm-up and cosine are meant where no kind is given."""
    return {"kind": "warmup_cosine", **value} if isinstance(value, dict) else value


LrScheduleConfig: TypeAlias = Annotated[
    Annotated[WarmupCosineConfig | WsdConfig | PiecewiseConfig, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]
"""Any of them, told apart by `kind`; warm-up and cosine where that is left out."""
