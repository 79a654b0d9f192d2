"""Learning-rate schedules of `transformers`, by their names there."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, final

from pydantic import Field, JsonValue, PositiveFloat, model_validator

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.section import Section

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

ScheduleName: TypeAlias = Literal[
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_warmup_with_min_lr",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
]
"""Schedules of `transformers` that are functions of the step."""

_ABSOLUTE = ("min_lr", "lr_end")


@final
class TransformersScheduleConfig(Section):
    """Schedule of `transformers`, with its conventions: with a warm-up, the first step has the learning rate 0."""

    kind: Literal["transformers"] = "transformers"
    name: ScheduleName = Field(description="Name of the schedule, as in `TrainingArguments.lr_scheduler_type`.")
    warmup_steps: int = Field(default=0, ge=0, description="Number of steps before the peak.")
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Other arguments, as in `TrainingArguments.lr_scheduler_kwargs`."
    )
    peak_learning_rate: PositiveFloat | None = Field(
        default=None,
        description="The optimizer's learning rate, for schedules that end at an absolute learning rate: `polynomial`, "
        "and those with the option `min_lr`.",
    )

    @model_validator(mode="after")
    def _uses_every_setting(self) -> Self:
        if self.name == "constant" and (self.warmup_steps or self.options):
            raise ValueError("the schedule constant has no warm-up and no options; set name = constant_with_warmup")
        is_absolute = self.name == "polynomial" or any(name in self.options for name in _ABSOLUTE)
        if is_absolute != (self.peak_learning_rate is not None):
            expected = "the optimizer's learning_rate" if is_absolute else "null: the schedule is relative to the peak"
            raise ValueError(f"peak_learning_rate = {self.peak_learning_rate}; expected {expected}")
        return self

    def build(self, num_steps: int) -> Callable[[int], float]:
        """Return the schedule for a job of `num_steps` steps, as a function of the step, counted from 0.

        Raises:
            UserError: If `transformers` is missing, or does not accept the options.
        """
        try:
            from transformers import get_scheduler
        except ImportError:
            hint = install_hint("d9d-loop", "transformers")
            raise UserError(f"lr_schedule.kind = transformers needs transformers. Install it: {hint}") from None
        import torch  # noqa: PLC0415 - configurations need no torch

        peak = 1.0 if self.peak_learning_rate is None else self.peak_learning_rate
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        options: Any = dict(self.options)
        try:
            scheduler: LambdaLR = get_scheduler(
                self.name,
                optimizer,
                num_warmup_steps=self.warmup_steps,
                num_training_steps=num_steps,
                scheduler_specific_kwargs=options,
            )
            factors = [scheduler.lr_lambdas[0](step) for step in range(num_steps)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"lr_schedule.options = {self.options}; expected arguments of the schedule {self.name} of "
                f"transformers: {error}"
            ) from error
        if not all(map(math.isfinite, factors)):
            raise UserError(f"the schedule {self.name} of transformers is not finite with options = {self.options}.")
        return lambda step: factors[min(step, num_steps - 1)]
