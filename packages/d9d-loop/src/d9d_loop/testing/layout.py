"""A layout as one short line: which degrees of parallelism, and how large a microbatch."""

from dataclasses import dataclass
from math import prod

from d9d_dist import MeshConfig, UserError
from d9d_loop.pipeline_schedule import KINDS, ScheduleConfig

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
    """Where the numbers of a job are computed.

    Attributes:
        mesh: The degrees of parallelism, none of them -1.
        microbatch_size: Samples of a forward pass on one rank; `None` for all of a rank's samples at once.
        schedule: In which order pipeline ranks compute.
    """

    mesh: MeshConfig
    microbatch_size: int | None = None
    schedule: ScheduleConfig = ONE_FORWARD_ONE_BACKWARD

    @property
    def world_size(self) -> int:
        """The number of ranks; experts borrow theirs."""
        return prod(getattr(self.mesh, name) for axis, name in _DEGREES.items() if axis != "ep")


def parse_layout(text: str) -> Layout:
    """Read a layout such as `"pp=2,tp=2,schedule=zbv,microbatch=1"`; `""` is one process.

    Args:
        text: Degrees by axis (pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp, ep), 1 where left out, the
            size of a microbatch, and a schedule by its name in the configuration.

    Raises:
        UserError: If a name or a number is none of these.
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
    mesh = MeshConfig.model_validate({_DEGREES[name]: degree for name, degree in values.items()})
    return Layout(mesh, microbatch_size, schedule)
