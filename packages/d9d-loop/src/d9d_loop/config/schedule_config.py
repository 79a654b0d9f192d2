"""Pipeline schedule configuration. Other schedules are passed to `Trainer(pipeline_schedule=)` as objects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from d9d_dist import UserError
from d9d_pipeline import (
    DualPipeV,
    GPipe,
    Interleaved,
    LoopedBreadthFirst,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble1P,
    ZeroBubbleV,
)

Kind = Literal["gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"]

KINDS: tuple[str, ...] = get_args(Kind)

_FIXED: Mapping[Kind, Callable[..., Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "zbv": ZeroBubbleV,
    "dualpipev": DualPipeV,
}
_LOOPED: Mapping[Kind, Callable[..., Schedule]] = {
    "looped_bfs": LoopedBreadthFirst,
    "interleaved_1f1b": Interleaved,
    "zb1p": ZeroBubble1P,
}
_BOUNDED: tuple[Kind, ...] = ("1f1b", "interleaved_1f1b", "zb1p")


class ScheduleConfig(BaseModel):
    """Pipeline schedule and its options. A configuration may give only the name: `--pipeline.schedule zbv`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = Field(default="1f1b", description="Name of the pipeline schedule.")
    stages_per_rank: PositiveInt | None = Field(
        default=None, description="Stages per rank, for schedules that allow a choice; by default 2, and 1 for zb1p."
    )

    warmup: Literal["short", "long"] | None = Field(
        default=None,
        description="Warm-up forwards of zb1p with several stages per rank: short keeps fewer in-flight "
        "activations, long overlaps transfers better; by default short.",
    )
    max_activations: PositiveInt | None = Field(
        default=None,
        description="Maximum number of in-flight activations of a rank, counted in (stage, microbatch) pairs; only for "
        "1f1b, interleaved_1f1b and zb1p. By default as many as the schedule needs to run without stalls.",
    )

    def build(self) -> Schedule:
        """Build the schedule. Options that the schedule does not support raise `UserError`."""
        options: dict[str, Any] = {}
        if self.warmup is not None:
            self._check("warmup", self.warmup, ("zb1p",))
            options["warmup"] = self.warmup
        if self.max_activations is not None:
            self._check("max_activations", self.max_activations, _BOUNDED)
            options["max_activations"] = self.max_activations
        if self.kind in _FIXED:
            schedule = _FIXED[self.kind](**options)
            if self.stages_per_rank not in (None, schedule.stages_per_rank):
                raise UserError(
                    f"pipeline.schedule.stages_per_rank = {self.stages_per_rank}; {self.kind} always has "
                    f"{schedule.stages_per_rank}. Remove it, or use one of {', '.join(_LOOPED)}."
                )
            return schedule
        return _LOOPED[self.kind](self.stages_per_rank or (1 if self.kind == "zb1p" else 2), **options)

    def _check(self, name: str, value: object, kinds: Sequence[Kind]) -> None:
        """Raise `UserError` unless the schedule is one of `kinds`, the schedules with the option `name`."""
        if self.kind not in kinds:
            raise UserError(
                f"pipeline.schedule.{name} = {value}; {self.kind} does not have this option. Remove it, or use one "
                f"of {', '.join(kinds)}."
            )


PipelineScheduleConfig = Annotated[ScheduleConfig, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)]
