"""Layouts of a job, and their notation in one line: degrees of parallelism, microbatch size and schedule."""

from dataclasses import dataclass
from math import prod

from d9d_dist import MeshConfig, UserError
from d9d_loop.config.schedule_config import KINDS, ScheduleConfig

_DEGREES = {
    "pp": "pipeline_parallel",
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp_shard": "context_parallel_shard",
    "cp_replicate": "context_parallel_replicate",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
}


ONE_FORWARD_ONE_BACKWARD = ScheduleConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a job: how its computation is distributed over ranks and microbatches.

    Attributes:
        mesh: Degrees of parallelism; none may be -1.
        microbatch_size: Samples of a microbatch on one data-parallel rank; `None` for all of the rank's samples.
    """

    mesh: MeshConfig
    microbatch_size: int | None = None
    schedule: ScheduleConfig = ONE_FORWARD_ONE_BACKWARD

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees except `ep`, which reuses the ranks of other axes."""
        return prod(getattr(self.mesh, name) for axis, name in _DEGREES.items() if axis != "ep")


def parse_layout(text: str) -> Layout:
    """Parse a layout such as `"pp=2,tp=2,schedule=zbv,microbatch=1"`; `""` is a single process.

    Args:
        text: Comma-separated `axis=degree` for the axes pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp and ep
            (default 1), `microbatch=size`, and `schedule=` with the name of a pipeline schedule.

    Raises:
        UserError: If an item has an unknown name, a repeated axis, or a value that is not a positive integer or a
            schedule.
    """
    values: dict[str, int] = {}
    schedule = ONE_FORWARD_ONE_BACKWARD
    for part in filter(None, text.split(",")):
        name, _, number = (word.strip() for word in part.partition("="))
        if name == "schedule" and number in KINDS:
            schedule = ScheduleConfig.model_validate({"kind": number})
            continue
        if name not in (*_DEGREES, "microbatch") or not number.isdecimal() or int(number) < 1 or name in values:
            raise UserError(
                f"layout {text!r}: got {part.strip()!r}; expected axis=degree, each axis once, with one of "
                f"{', '.join(_DEGREES)}, microbatch=size, or schedule= and one of {', '.join(KINDS)}."
            )
        values[name] = int(number)
    microbatch_size = values.pop("microbatch", None)
    degrees = {field: values.get(name, 1) for name, field in _DEGREES.items()}
    mesh = MeshConfig.model_validate(degrees)
    return Layout(mesh, microbatch_size, schedule)
