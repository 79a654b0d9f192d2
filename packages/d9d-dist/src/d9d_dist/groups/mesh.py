"""Degrees of parallelism of a job, and its mesh domains: several meshes over the same ranks.

| domain  | axes, slowest first                                            | used for                            |
| ------- | -------------------------------------------------------------- | ----------------------------------- |
| regular | pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp         | coordinates of a rank               |
| dense   | pp, dp_replicate, dp_cp_shard, cp_replicate, tp                | parameters of dense layers          |
| expert  | pp, ep_replicate, ep_shard                                     | parameters of experts               |
| batch   | pp, dp, cp, tp                                                 | which samples and tokens a rank sees |
| flat    | world                                                          | all ranks on one axis               |

The expert mesh uses the ranks of dp x cp x tp: `ep_replicate * ep_shard` is the product of those degrees.
"""

from math import prod
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from d9d_dist.errors import UserError
from d9d_dist.groups.launch import Launch, read_launch
from d9d_dist.groups.timeouts import Timeouts
from d9d_dist.precision import PrecisionName

if TYPE_CHECKING:
    from d9d_dist.groups.context import DistributedContext, Domains


class MeshConfig(BaseModel):
    """Degrees of parallelism. Their product, without `expert_parallel`, is the number of ranks.

    One degree may be -1, which stands for all remaining ranks. By default `data_parallel_shard` is -1, so a job that
    sets no degree shards its parameters over all of its ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline_parallel: int = Field(default=1, description="Number of ranks of a pipeline (axis pp).")
    data_parallel_replicate: int = Field(
        default=1, description="Number of replicas of the parameters, each with its own samples."
    )
    data_parallel_shard: int = Field(
        default=-1,
        description="Number of ranks that shard the parameters, each with its own samples; -1: all remaining ranks.",
    )
    context_parallel_shard: int = Field(
        default=1, description="Number of ranks that shard each sequence and the parameters."
    )
    context_parallel_replicate: int = Field(
        default=1, description="Number of ranks that shard each sequence, with replicated parameters."
    )
    tensor_parallel: int = Field(default=1, description="Number of ranks that shard each layer's matrices (axis tp).")
    expert_parallel: int = Field(
        default=1,
        description="Number of ranks that shard the experts, out of the data-, context- and tensor-parallel ranks.",
    )

    @field_validator("*")
    @classmethod
    def _positive_or_rest(cls, degree: int) -> int:
        if degree < 1 and degree != -1:
            raise ValueError(f"got {degree}; expected a positive number of ranks, or -1 for all remaining ranks")
        return degree

    def resolve(self, world_size: int) -> Self:
        """Replace -1 by the number of remaining ranks, and check that the product of the degrees is `world_size`.

        Raises:
            UserError: If the product cannot be `world_size`, or the expert degree does not divide the ranks of a stage.
        """
        degrees = {name: getattr(self, name) for name in type(self).model_fields if name != "expert_parallel"}
        if "data_parallel_shard" not in self.model_fields_set and list(degrees.values()).count(-1) > 1:
            degrees["data_parallel_shard"] = 1  # another degree was set to -1 and takes the remaining ranks
        rest = [name for name, degree in degrees.items() if degree == -1]
        known = prod(degree for degree in degrees.values() if degree != -1)
        if len(rest) > 1:
            raise UserError(
                f"mesh.{' and mesh.'.join(rest)} are -1; expected at most one, which takes the remaining ranks. "
                "Set a number for the others."
            )
        if rest and world_size % known == 0:
            degrees[rest[0]] = world_size // known
        elif rest or known != world_size:
            raise UserError(_describe_product(degrees, known, world_size))
        experts = world_size // degrees["pipeline_parallel"]
        expert_parallel = experts if self.expert_parallel == -1 else self.expert_parallel
        if experts % expert_parallel:
            raise UserError(
                f"mesh.expert_parallel = {expert_parallel}; expected a divisor of the {experts} ranks of a pipeline "
                "stage (data x context x tensor parallel degrees), which expert parallelism reuses. "
                f"Use one of {_divisors(experts)}, or -1 for all of them."
            )
        return self.model_copy(update={**degrees, "expert_parallel": expert_parallel})

    def domains(self) -> "Domains":
        """Return the axis sizes of every domain, slowest axis first. Requires a configuration without -1."""
        pp, tp, ep = self.pipeline_parallel, self.tensor_parallel, self.expert_parallel
        dp_replicate, dp_shard = self.data_parallel_replicate, self.data_parallel_shard
        cp_shard, cp_replicate = self.context_parallel_shard, self.context_parallel_replicate
        dp, cp = dp_replicate * dp_shard, cp_shard * cp_replicate
        return {
            "regular": {
                "pp": pp,
                "dp_replicate": dp_replicate,
                "dp_shard": dp_shard,
                "cp_shard": cp_shard,
                "cp_replicate": cp_replicate,
                "tp": tp,
            },
            "dense": {
                "pp": pp,
                "dp_replicate": dp_replicate,
                "dp_cp_shard": dp_shard * cp_shard,
                "cp_replicate": cp_replicate,
                "tp": tp,
            },
            "expert": {"pp": pp, "ep_replicate": dp * cp * tp // ep, "ep_shard": ep},
            "batch": {"pp": pp, "dp": dp, "cp": cp, "tp": tp},
            "flat": {"world": pp * dp * cp * tp},
        }

    def build(
        self, *, launch: Launch | None = None, timeouts: Timeouts | None = None, precision: PrecisionName = "parameters"
    ) -> "DistributedContext":
        """Join the job: check the degrees, start the process group and build the meshes.

        Collective over all ranks of the job. Without a launcher the job has one process. By default `launch` is read
        from the environment. `precision` is resolved for the device, see `DistributedContext.precision`. Close the
        returned context, or use it in a `with` statement.

        Raises:
            UserError: If the degrees do not match the number of ranks, before any process group starts. On every rank,
                if the degrees differ between ranks.
        """
        from d9d_dist.groups.context import DistributedContext  # noqa: PLC0415 - configurations need no torch

        launch = launch or read_launch()
        domains = self.resolve(launch.world_size).domains()
        return DistributedContext(domains, launch=launch, timeouts=timeouts or Timeouts(), precision=precision)


def _describe_product(degrees: dict[str, int], known: int, world_size: int) -> str:
    used = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1) or "all degrees 1"
    if -1 in degrees.values():
        return (
            f"mesh: {used} on {world_size} ranks; expected the product of the given degrees, {known}, to divide "
            f"{world_size}. Start a multiple of {known} ranks, or choose degrees whose product divides {world_size}."
        )
    rest, remainder = divmod(world_size, known // degrees["data_parallel_shard"])
    other = (
        f"choose degrees whose product is {world_size}"
        if remainder
        else f"set mesh.data_parallel_shard = -1, which then takes the remaining ranks: {rest}"
    )
    ranks = "1 rank" if known == 1 else f"{known} ranks"
    return (
        f"mesh: {used} make {ranks}, but the job has {world_size}. Start {ranks} (on one machine: torchrun "
        f"--nproc-per-node {known}), or {other}."
    )


def _divisors(number: int) -> str:
    """Format the divisors of a number. If there are more than ten, "..." replaces the middle ones."""
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(divisors if len(divisors) <= 10 else [*divisors[:5], "...", *divisors[-4:]])
