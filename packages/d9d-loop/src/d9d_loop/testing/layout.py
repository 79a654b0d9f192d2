"""A layout as one short line: which degrees of parallelism, and how large a microbatch."""

from dataclasses import dataclass
from math import prod

from d9d_dist import MeshConfig, UserError

_DEGREES = {
    "pp": "pipeline_parallel",
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp_shard": "context_parallel_shard",
    "cp_replicate": "context_parallel_replicate",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the numbers of a job are computed.

    Attributes:
        mesh: The degrees of parallelism, none of them -1.
        microbatch_size: Samples of a forward pass on one rank; `None` for all of a rank's samples at once.
    """

    mesh: MeshConfig
    microbatch_size: int | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks; experts borrow theirs."""
        return prod(getattr(self.mesh, name) for axis, name in _DEGREES.items() if axis != "ep")


def parse_layout(text: str) -> Layout:
    """Read a layout such as `"dp_shard=2,tp=2,microbatch=1"`; `""` is one process.

    Args:
        text: Degrees by axis (pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp, ep), 1 where left out, and the
            size of a microbatch.

    Raises:
        UserError: If a name or a number is none of these.
    """
    values: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in (*_DEGREES, "microbatch") or not number.isdecimal() or int(number) < 1 or name in values:
            raise UserError(
                f"layout {text!r}: got {part.strip()!r}; expected axis=degree, each axis once, with one of "
                f"{', '.join(_DEGREES)}, or microbatch=size."
            )
        values[name] = int(number)
    microbatch_size = values.pop("microbatch", None)
    mesh = MeshConfig.model_validate({_DEGREES[name]: degree for name, degree in values.items()})
    return Layout(mesh, microbatch_size)
