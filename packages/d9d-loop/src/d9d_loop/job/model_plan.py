"""Plan of a model's layout over the ranks of a job, made before a process group starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from d9d_dist import Launch, MeshConfig, UserError
from d9d_loop.model.built_model import BuiltModel
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.model.stage_check import build_stages, check_chain, check_parts
from d9d_loop.task import to_inputs
from d9d_pipeline import Inputs, Program, Schedule, build
from d9d_state import StateMapper


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Checked layout of a model over the ranks of a job.

    Attributes:
        launch: Rank of this process, world size, and node.
        mesh: Degrees of parallelism, with -1 resolved.
        schedule: Pipeline schedule.
        program: The schedule's program for this number of pipeline ranks and microbatches.
        weights: Folder of the initial weights; `None` if none are loaded.
        load_mapper: State mapper from the weights in that folder to those of the whole model; `None` if the names are
            the same.
        shared_names: Parameters shared by several stages, with the indices of those stages; the owner comes first.
        model: The whole model as it was built.
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
        """Number of data-parallel ranks: replicate degree times shard degree."""
        return self.mesh.data_parallel_replicate * self.mesh.data_parallel_shard

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks: shard degree times replicate degree."""
        return self.mesh.context_parallel_shard * self.mesh.context_parallel_replicate


def build_program(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    """Build the pipeline program of a job.

    Raises:
        UserError: If the schedule does not support this number of ranks or microbatches.
    """
    try:
        return build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    except UserError as error:
        raise UserError(
            f"pipeline.schedule: {error} A step has {num_microbatches} microbatches per data-parallel rank "
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
    """Build all pipeline stages on `meta` and check them against the whole model.

    Args:
        provider: Builds the stages.
        model: The whole model.
        program: Pipeline program, which assigns stages to ranks.
        seed: The job's seed.
        stages_per_rank: Number of stages on each rank, for the error message.
        inputs: Returns the model's inputs for a microbatch, to run the stages on `meta`; `None` skips that check.

    Returns:
        Parameters shared by several stages, with the indices of those stages; the owner comes first.

    Raises:
        UserError: If the stages' parameters differ from the model's, or a stage rejects the previous stage's output.
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
