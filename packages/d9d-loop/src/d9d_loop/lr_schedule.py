"""Learning-rate schedules: pure functions of the step, so that a resumed job needs no state of theirs."""

import math
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LrSchedule = Callable[[int], float]
"""The factor of the peak learning rate for a step, counted from 0."""


class WarmupCosineConfig(BaseModel):
    """Linear warm-up, then half a cosine (Loshchilov, Hutter, arXiv:1608.03983) down to a fraction of the peak."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup_steps: int = Field(0, ge=0, description="Steps until the peak; 0 starts at the peak.")
    final_fraction: float = Field(0.1, ge=0, le=1, description="Fraction of the peak at the last step.")

    def build(self, num_steps: int) -> LrSchedule:
        """The schedule of a job of so many steps.

        Step s of the warm-up has the factor (s + 1) / (warmup_steps + 1), so that the first step is not lost.
        """
        decay_steps = max(num_steps - 1 - self.warmup_steps, 1)

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            progress = min((step - self.warmup_steps) / decay_steps, 1.0)
            cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
            return self.final_fraction + (1.0 - self.final_fraction) * cosine

        return factor


LrScheduleConfig = WarmupCosineConfig
