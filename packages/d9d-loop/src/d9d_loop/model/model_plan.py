"""Plan of a model's layout over the ranks of a job, made before a process group starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d9d_dist import Launch, MeshConfig, StageInfo, UserError
from d9d_loop.model.built_model import BuiltModel, build_model
from d9d_loop.model.model_options import ModelOptions
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.model.stage_check import build_stages, check_chain, check_parts
from d9d_loop.task import BatchTask, to_inputs
from d9d_pipeline import Program, Schedule, build
from d9d_state import StateMapper
from d9d_state.model_load import check_model_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Checked layout of a model over the ranks of a job.

    Attributes:
        options: Changes of the model and of its stages after each build.
        mesh: Degrees of parallelism, with -1 resolved.
        shared_names: Parameters shared by several stages, with the indices of those stages; the owner comes first.
        weights: Folder of the initial weights, if any.
        load_mapper: State mapper from the tensors in `weights` to the whole model's tensors; `None` if the names are
            equal.
    """

    provider: ModelProvider
    options: ModelOptions
    seed: int
    launch: Launch
    mesh: MeshConfig
    schedule: Schedule
    program: Program
    built: BuiltModel
    shared_names: Mapping[str, tuple[int, ...]]
    weights: Path | None = None
    load_mapper: StateMapper | None = None

    @property
    def is_pipelined(self) -> bool:
        """True if there are several pipeline ranks."""
        return len(self.program.ranks) > 1

    @property
    def shards_by_default(self) -> bool:
        """True if several ranks shard the model by the `parallelize` of `ModelProvider`."""
        return self.launch.world_size > 1 and type(self.provider).parallelize is ModelProvider.parallelize

    def with_weights(self, key: str, folder: Path | None) -> "ModelPlan":
        """Return the plan with initial weights from a folder, if any, which the configuration key `key` sets.

        Reads no tensor data.

        Raises:
            UserError: If weights are missing, unexpected, or have another shape. Also if a parameter was built without
                values and the folder has none for it.
        """
        if folder is None:
            return self
        mapper = self.provider.load_mapper(self.built.module, folder)
        try:
            check_model_state(self.built.module, folder, mapper)
        except UserError as error:
            raise UserError(f"{key} = {folder}: {error}") from None
        groups = mapper.groups if mapper else ()
        kept = {output for group in groups if not group.inputs for output in group.outputs}
        if empty := sorted(kept & self.built.without_values):
            raise UserError(
                f"{key} = {folder} has no values for {', '.join(empty)}, and the build does not set them; "
                "expected all weights of the model. Choose a folder with weights of this model."
            )
        return replace(self, weights=folder, load_mapper=mapper)


def plan_model(
    provider: ModelProvider,
    *,
    launch: Launch,
    mesh: MeshConfig,
    schedule: Schedule,
    num_microbatches: int,
    seed: int,
    task: BatchTask,
    first_batch: Callable[[], Any] | None,
    options: ModelOptions | None = None,
) -> ModelPlan:
    """Build the model without its values, and check that it can be trained or run in a layout. No collectives.

    `mesh` must have -1 resolved. `num_microbatches` is the number of microbatches of a step on one data-parallel rank.
    `first_batch` reads a microbatch, to run the stages on `meta` if there are several; `None` skips this check.

    Raises:
        UserError: If the task cannot split sequences for context parallelism, or the schedule does not support the
            number of ranks or microbatches. Also if the stages' parameters differ from the model's, or a stage rejects
            the previous stage's output.
    """
    num_parts = mesh.context_parallel_shard * mesh.context_parallel_replicate
    cuts_sequences = num_parts > 1
    can_split = any("split_sequence" in vars(kind) for kind in type(task).mro() if kind is not BatchTask)
    if cuts_sequences and not can_split:
        name = type(task).__name__
        raise UserError(
            f"the mesh has context-parallel ranks, but {name} cannot split a batch over them; expected a "
            f"method {name}.split_sequence(batch, split). Implement it, or set the context-parallel degrees to 1."
        )
    num_ranks = mesh.pipeline_parallel
    try:
        program = build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    except UserError as error:
        raise UserError(
            f"pipeline.schedule: {error} A step has {num_microbatches} microbatches per data-parallel rank "
            "(batch.global_size / data-parallel ranks / batch.microbatch_size) and mesh.pipeline_parallel = "
            f"{num_ranks}."
        ) from None
    built = build_model(provider, StageInfo(), seed=seed, keep_values=launch.world_size == 1)
    options = options or ModelOptions()
    options.check(built.module)
    options.apply(built.module)
    shared_names: Mapping[str, tuple[int, ...]] = {}
    if program.num_stages > 1:
        if first_batch is not None:
            cost = provider.first_cost(built.module, lambda: to_inputs(task.inputs(first_batch())))
            if cost is not None:
                provider.virtual_layers = round(cost * num_parts * mesh.tensor_parallel)
        try:
            stages = build_stages(provider, program.num_stages, seed=seed)
        except UserError as error:
            per_rank = schedule.stages_per_rank
            raise UserError(
                f"mesh.pipeline_parallel = {num_ranks} with {per_rank} stages on each rank: {error}"
            ) from None
        shared_names = check_parts(built.module, stages)
        # Under context parallelism, `task.inputs` expects a split batch, which needs the process group.
        if first_batch is not None and not cuts_sequences:
            check_chain(built.module, stages, to_inputs(task.inputs(first_batch())), program.stage_ranks)
    return ModelPlan(
        provider=provider,
        options=options,
        seed=seed,
        launch=launch,
        mesh=mesh,
        schedule=schedule,
        program=program,
        built=built,
        shared_names=shared_names,
    )
