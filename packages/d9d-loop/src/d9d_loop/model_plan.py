"""How a model is laid out over the ranks of a job, found before a process group starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from d9d_dist import Launch, MeshConfig, UserError
from d9d_loop.built_model import BuiltModel
from d9d_loop.model_provider import ModelProvider
from d9d_loop.stage_check import build_stages, check_chain, check_parts
from d9d_loop.task import to_inputs
from d9d_pipeline import Inputs, Program, Schedule, build
from d9d_state import StateMapper


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How a model is laid out, found to fit together.

    Attributes:
        launch: The place of this process in the job.
        mesh: The degrees of parallelism, without -1.
        schedule: In which order pipeline ranks compute.
        program: What that is for this job.
        weights: Folder of the weights to begin with, if there is one.
        load_mapper: How the weights in that folder become the whole model's.
        shared_names: Parameters that several stages have, with those stages, the owner first.
        model: The whole model, as it was built.
    """

    launch: Launch
    mesh: MeshConfig
    schedule: Schedule
    program: Program
    weights: Path | None
    load_mapper: StateMapper | None
    shared_names: Mapping[str, tuple[int, ...]]
    model: BuiltModel

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.mesh.data_parallel_replicate * self.mesh.data_parallel_shard

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.mesh.context_parallel_shard * self.mesh.context_parallel_replicate


def build_program(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    """Build the program of a job.

    Raises:
        UserError: If the schedule cannot be run by so many ranks, or with so many microbatches.
    """
    try:
        return build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    except UserError as error:
        raise UserError(
            f"pipeline.schedule: {error} The step has {num_microbatches} microbatches for each data-parallel rank "
            "(batch.global_size / data-parallel ranks / batch.microbatch_size) and mesh.pipeline_parallel = "
            f"{num_ranks}."
        ) from None


def check_stages(
    provider: ModelProvider,
    model: nn.Module,
    program: Program,
    *,
    seed: int,
    stages_per_rank: int,
    inputs: Callable[[], Inputs | Mapping[str, Any]] | None,
) -> Mapping[str, tuple[int, ...]]:
    """Check the stages of a model against the whole of it.

    Args:
        provider: Builds the stages.
        model: The whole model, on `meta`.
        program: Which rank has which stages.
        seed: The job's seed.
        stages_per_rank: How many stages each rank has.
        inputs: Makes what goes in for a microbatch, to run the stages with on `meta`; `None` leaves that out.

    Returns:
        Parameters that several stages have, with those stages, the owner first.

    Raises:
        UserError: If stages do not make up the model, or do not fit to each other.
    """
    if program.num_stages == 1:
        return {}
    try:
        stages = build_stages(provider, program.num_stages, seed=seed)
    except UserError as error:
        ranks = len(program.ranks)
        raise UserError(
            f"mesh.pipeline_parallel = {ranks} with {stages_per_rank} stages on each rank: {error}"
        ) from None
    shared_names = check_parts(model, stages)
    if inputs is not None:
        check_chain(model, stages, to_inputs(inputs()), program.stage_ranks)
    return shared_names
