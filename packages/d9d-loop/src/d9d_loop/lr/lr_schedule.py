"""Learning-rate schedules: pure functions of the step, so checkpoints need no schedule state."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias, final

from pydantic import Field, NonNegativeFloat

from d9d_dist import UserError
from d9d_loop.lr.phase import ConstantPhase, CosinePhase, LinearPhase, Phase, SqrtPhase, piecewise
from d9d_loop.lr.transformers_schedule import TransformersScheduleConfig
from d9d_loop.section import Section, default_kind

LrSchedule = Callable[[int], float]
"""Function of the step, counted from 0, that returns the learning rate relative to the peak."""


@final
class WarmupCosineConfig(Section):
    """Linear warm-up, then cosine decay (Loshchilov, Hutter, arXiv:1608.03983) to a fraction of the peak."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup_steps: int = Field(default=0, ge=0, description="Number of steps until the peak; 0 starts at the peak.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Fraction of the peak at the last step.")

    def build(self, num_steps: int) -> LrSchedule:
        """Return the schedule for a job of `num_steps` steps.

        Warm-up step s, counted from 0, has the factor (s + 1) / (warmup_steps + 1), so the first factor is not 0.
        """
        decay = CosinePhase(to=self.final_fraction)
        if self.warmup_steps == 0:
            return piecewise([decay], num_steps=num_steps, start=1.0)
        warmup = LinearPhase(steps=self.warmup_steps, to=1.0)
        # warmup_steps may exceed num_steps: the job then ends during warm-up.
        return piecewise([warmup, decay], num_steps=max(num_steps, self.warmup_steps + 1))


_CURVES = MappingProxyType({"linear": LinearPhase, "cosine": CosinePhase, "sqrt": SqrtPhase})


@final
class WsdConfig(Section):
    """Warm-up, stable, decay (Hu et al., arXiv:2404.06395): only the decay depends on the length of the job."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: int = Field(default=0, ge=0, description="Number of steps until the peak; 0 starts at the peak.")
    decay_percent: float = Field(
        default=20.0, gt=0, le=100, description="Length of the decay at the end of the job, in percent of all steps."
    )
    decay: Literal["linear", "cosine", "sqrt"] = Field(default="sqrt", description="Shape of the decay.")
    final_fraction: float = Field(default=0.0, ge=0, le=1, description="Fraction of the peak at the last step.")

    def build(self, num_steps: int) -> LrSchedule:
        """Return the schedule for a job of `num_steps` steps.

        Raises:
            UserError: If warm-up and decay leave no step for the stable phase.
        """
        decay = _CURVES[self.decay](percent=self.decay_percent, to=self.final_fraction)
        if self.warmup_steps == 0:
            return piecewise([ConstantPhase(), decay], num_steps=num_steps, start=1.0)
        warmup = LinearPhase(steps=self.warmup_steps, to=1.0)
        return piecewise([warmup, ConstantPhase(), decay], num_steps=num_steps)


@final
class PiecewiseConfig(Section):
    """Sequence of phases. Each phase starts at the final value of the previous phase."""

    kind: Literal["piecewise"] = "piecewise"
    start: NonNegativeFloat | None = Field(
        default=None,
        description="Learning rate at the start of the first phase, relative to the peak. With 0, the first phase "
        "begins one step before the job. null: 0 if the first phase leads to the peak (a warm-up), otherwise 1.",
    )
    phases: tuple[Phase, ...] = Field(min_length=1, description="Phases in order; one of them may omit its length.")

    def build(self, num_steps: int) -> LrSchedule:
        """Return the schedule for a job of `num_steps` steps.

        Raises:
            UserError: If the phases cover fewer or more steps than the job has, the learning rate is 0 in every step,
                or `start` is null and may be either 0 or 1.
        """
        try:
            return piecewise(self.phases, num_steps=num_steps, start=self.start)
        except UserError as error:
            raise UserError(f"lr_schedule.phases: {error}") from None


LrScheduleConfig: TypeAlias = Annotated[
    Annotated[
        WarmupCosineConfig | WsdConfig | PiecewiseConfig | TransformersScheduleConfig, Field(discriminator="kind")
    ],
    default_kind("warmup_cosine"),
]
"""Any learning-rate schedule, selected by `kind`; the default is "warmup_cosine"."""
