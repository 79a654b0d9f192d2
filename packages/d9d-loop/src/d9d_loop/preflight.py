"""Everything that a user can get wrong about a job, found before a process group starts or a file is written."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from d9d_dist import DistributedContext, Launch, MeshConfig, StageInfo, UserError, canonical_name, read_launch
from d9d_loop.batches import Collate, Samples
from d9d_loop.config import TrainerConfig
from d9d_loop.model_provider import ModelProvider
from d9d_loop.stage_check import build_stages, check_chain, check_parts
from d9d_loop.task import Task, to_inputs
from d9d_pipeline import Program, Schedule, build
from d9d_state import (
    CheckpointInfo,
    CheckpointStore,
    JsonValue,
    StateError,
    StateMapper,
    TensorInfo,
    check_model_state,
    check_same_model,
    model_tensors,
)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What was derived from a configuration and the environment, and found to fit together.

    Attributes:
        launch: The place of this process in the job.
        mesh: The degrees of parallelism, without -1.
        dp_size: Number of data-parallel ranks.
        microbatch_size: Samples of a microbatch on one rank.
        num_microbatches: Microbatches of a step on one rank.
        mapper: How the whole model's weights on disk become its own, if any are read or written.
        schedule: In which order pipeline ranks compute.
        program: What that is for this job.
        shared_names: Parameters that several stages have, with those stages, the owner first.
    """

    launch: Launch
    mesh: MeshConfig
    dp_size: int
    microbatch_size: int
    num_microbatches: int
    mapper: StateMapper | None
    schedule: Schedule
    program: Program
    shared_names: Mapping[str, tuple[int, ...]]


def check_job(
    config: TrainerConfig,
    *,
    provider: ModelProvider,
    task: Task,
    data: Samples,
    evaluation_data: Samples | None,
    collate: Collate = default_collate,
    schedule: Schedule | None = None,
) -> JobPlan:
    """Check a job, without collectives and without writing anything.

    Args:
        config: The job's configuration.
        provider: Builds the model.
        task: Makes inputs and losses.
        data: The training data.
        evaluation_data: The evaluation data, if there are any.
        collate: Makes a batch of a list of samples.
        schedule: In which order pipeline ranks compute; by default, what the configuration says.

    Returns:
        What follows from the configuration on this process.

    Raises:
        UserError: Naming the field, what was got, what was expected and what to do.
    """
    launch = read_launch()
    mesh = config.mesh.resolve(launch.world_size)
    _check_degrees(mesh, task)
    dp_size = mesh.data_parallel_replicate * mesh.data_parallel_shard
    microbatch_size = _check_batch(config, dp_size)
    num_microbatches = config.batch.global_size // (dp_size * microbatch_size)
    schedule = schedule or config.pipeline.schedule.build()
    program = _build_program(schedule, num_ranks=mesh.pipeline_parallel, num_microbatches=num_microbatches)
    _check_data(data, "training data")
    if evaluation_data is not None:
        _check_data(evaluation_data, "evaluation data")
    _check_retention(config, task, evaluates=evaluation_data is not None)
    _check_writable(config.run.dir)
    with torch.device("meta"):
        model = provider.build(StageInfo())
    has_checkpoint = _check_checkpoint(config, model, num_samples=len(data))
    mapper = provider.state_mapper(model) if config.export or config.initial_weights is not None else None
    if config.initial_weights is not None and not has_checkpoint:
        _check_initial_weights(config.initial_weights, mapper, model)
    shared_names: Mapping[str, tuple[int, ...]] = {}
    if program.num_stages > 1:
        try:
            stages = build_stages(provider, program.num_stages)
        except UserError as error:
            ranks, each = len(program.ranks), schedule.stages_per_rank
            raise UserError(f"mesh.pipeline_parallel = {ranks} with {each} stages on each rank: {error}") from None
        shared_names = check_parts(model, stages)
        if mesh.context_parallel_shard * mesh.context_parallel_replicate == 1:  # else the task sees cut batches only
            batch = collate([data[index % len(data)] for index in range(microbatch_size)])
            check_chain(model, stages, to_inputs(task.inputs(batch)), program.stage_ranks)
    return JobPlan(launch, mesh, dp_size, microbatch_size, num_microbatches, mapper, schedule, program, shared_names)


def _check_degrees(mesh: MeshConfig, task: Task) -> None:
    cuts = mesh.context_parallel_shard * mesh.context_parallel_replicate > 1
    if cuts and not _says_how_to_split(task):
        task_name = type(task).__name__
        raise UserError(
            f"the mesh has context-parallel ranks, but {task_name} does not say how they share out a batch; expected a "
            f"method {task_name}.split_sequence(batch, split). Write one, or set the context-parallel degrees to 1."
        )


def _build_program(schedule: Schedule, *, num_ranks: int, num_microbatches: int) -> Program:
    try:
        return build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    except UserError as error:
        raise UserError(
            f"pipeline.schedule: {error} The step has {num_microbatches} microbatches for each data-parallel rank "
            "(batch.global_size / data-parallel ranks / batch.microbatch_size) and mesh.pipeline_parallel = "
            f"{num_ranks}."
        ) from None


def _says_how_to_split(task: Task) -> bool:
    return any("split_sequence" in vars(kind) for kind in type(task).mro() if kind is not Task)


def _check_batch(config: TrainerConfig, dp_size: int) -> int:
    """The size of a microbatch."""
    total, size = config.batch.global_size, config.batch.microbatch_size
    unit = dp_size if size is None else dp_size * size
    if total % unit:
        what = f"{dp_size} data-parallel ranks" + ("" if size is None else f" x batch.microbatch_size = {size}")
        below, above = total // unit * unit, (total // unit + 1) * unit
        raise UserError(
            f"batch.global_size = {total} cannot be shared out evenly to {what}; expected a multiple of {unit}. "
            f"Use {f'{below} or ' if below else ''}{above}, or change the degrees."
        )
    return total // dp_size if size is None else size


def _check_data(data: Samples, what: str) -> None:
    if len(data) == 0:
        raise UserError(f"the {what} are empty; expected at least one sample. Check where they are read from.")


def _check_retention(config: TrainerConfig, task: Task, *, evaluates: bool) -> None:
    """Refuse reasons to keep checkpoints that never hold, or that change nothing."""
    checkpoint = config.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        raise UserError(
            f"checkpoint.keep_every = {checkpoint.keep_every} is no multiple of checkpoint.every = {checkpoint.every}, "
            "so most of those steps have no checkpoint; expected a multiple. Change one of them."
        )
    if checkpoint.keep_last is None and (checkpoint.keep_every is not None or checkpoint.keep_best):
        raise UserError(
            "checkpoint.keep_last is null, which keeps every checkpoint; expected a number beside keep_every or "
            "keep_best. Set it, or leave them out."
        )
    if checkpoint.keep_best == 0:
        return
    names = {"loss", *task.metrics()}
    if not evaluates or checkpoint.best_by not in names:
        found = f"evaluations give {', '.join(sorted(names))}" if evaluates else "there are no evaluation data"
        raise UserError(
            f"checkpoint.keep_best = {checkpoint.keep_best} by {checkpoint.best_by!r}, but {found}; expected a value "
            "of the evaluation. Change --checkpoint.best_by, pass evaluation data, or set keep_best to 0."
        )
    if checkpoint.every % config.evaluation.every:
        raise UserError(
            f"checkpoint.every = {checkpoint.every} is no multiple of evaluation.every = {config.evaluation.every}, so "
            "checkpoints would be judged by older evaluations; expected a multiple where keep_best is set."
        )


def _check_writable(folder: Path) -> None:
    existing = folder.absolute()
    # Path.exists raises where a folder above may not be searched; this only says no.
    while not os.access(existing, os.F_OK):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "may not be written to" if existing.is_dir() else "is a file, not a folder"
        raise UserError(
            f"run folder {folder}: {existing} {reason}. Choose another one with --run.folder, or change permissions."
        )


def _check_checkpoint(config: TrainerConfig, model: nn.Module, *, num_samples: int) -> bool:
    """Whether there is a checkpoint to continue from, which then has to fit."""
    info = next(filter(_is_readable, CheckpointStore(checkpoint_folder(config)).complete()), None)
    if info is None:
        return False
    check_same_model(info, model)
    if info.step > config.steps:
        raise UserError(
            f"steps = {config.steps}, but the run in {config.run.dir} has done {info.step} already. "
            f"Use --steps {info.step} or more to continue it, or --run.name for a new run."
        )
    _check_same_samples(config, info, num_samples)
    return True


def _is_readable(info: CheckpointInfo) -> bool:
    """Whether what is looked at here is sound; if not, an older checkpoint will be loaded."""
    try:
        return info.state is not None
    except StateError:
        return False


def _check_same_samples(config: TrainerConfig, info: CheckpointInfo, num_samples: int) -> None:
    """Refuse a change of what the order of samples follows from: some would be lost, others seen twice."""
    state: Any = info.state
    if state["num_samples"] != num_samples:
        raise UserError(
            f"the training data have {num_samples} samples, but the run in {config.run.dir} was started with "
            f"{state['num_samples']}, and their order follows from that. Use the same data, or another --run.name."
        )
    before = _what_orders_samples(state["config"])
    for name, now in _what_orders_samples(config.model_dump(mode="json")).items():
        if now != before[name]:
            then = json.dumps(before[name])
            raise UserError(
                f"{name} = {json.dumps(now)}, but the run in {config.run.dir} was started with {then}, and which "
                f"samples it has seen follows from that. Use --{name} {then}, or --run.name for a new run."
            )


def _what_orders_samples(config: Any) -> dict[str, JsonValue]:
    return {
        "seed": config["seed"],
        "batch.global_size": config["batch"]["global_size"],
        "data.shuffle": config["data"]["shuffle"],
    }


def _check_initial_weights(folder: Path, mapper: StateMapper | None, model: nn.Module) -> None:
    try:
        check_model_state(model, folder, mapper)
    except UserError as error:
        raise UserError(f"initial_weights = {folder}: {error}") from None


def check_metric_names(task: Task) -> None:
    """Refuse metrics of a task that have the names of values that the Trainer reports itself.

    Raises:
        UserError: Listing them.
    """
    own = {"loss", "grad_norm", "learning_rate", f"{task.weight_unit}_per_second", "step", "time", "config"}
    if taken := sorted(own & task.metrics().keys()):
        raise UserError(
            f"the task's metrics include {', '.join(taken)}, which the Trainer reports itself; rename them."
        )


def describe_tensors(model: nn.Module) -> dict[str, TensorInfo]:
    """Global shape and dtype of every parameter and persistent buffer."""
    return {name.removeprefix("model."): TensorInfo.of(tensor) for name, tensor in model_tensors(model).items()}


def check_unchanged(model: nn.Module, built: Mapping[str, TensorInfo]) -> None:
    """Refuse a model that is not what was built any more: a checkpoint of it would not fit the model of the next start.

    Args:
        model: After `parallelize`.
        built: What `describe_tensors` said before.

    Raises:
        UserError: Listing the differences.
    """
    now = describe_tensors(model)
    lines = [
        f"  {name}: built as {built[name].describe() if name in built else 'nothing'}, now "
        f"{now[name].describe() if name in now else 'nothing'}"
        for name in dict.fromkeys([*built, *now])
        if built.get(name) != now.get(name)
    ]
    if lines:
        raise UserError(
            "the model provider's parallelize changed the model, so that its checkpoints could not be resumed from:\n"
            + "\n".join(lines)
            + "\nDo that in build, or, to compute in another dtype, pass a Precision to parallelize_hsdp."
        )


def check_parallelized(model: nn.Module, ctx: DistributedContext) -> None:
    """Refuse a model of which a trainable parameter is not on every axis of more than one rank.

    Raises:
        UserError: Listing such parameters, whose gradients would not be summed over all ranks.
    """
    num_ranks = ctx.world_size // ctx.size("dense", "pp")
    alone = [
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _num_ranks(parameter) != num_ranks
    ]
    if alone:
        tensor_parallel = 'parallelize_tensor(model, dense["tp"], plan), then ' if ctx.size("dense", "tp") > 1 else ""
        raise UserError(
            f"the model provider's parallelize left {', '.join(alone)} to fewer than the {num_ranks} ranks of a stage, "
            "so their gradients would not be summed over all; expected DTensors on every axis of more than one rank, "
            f"made on the whole model by {tensor_parallel}"
            'parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard").'
        )


def _num_ranks(parameter: torch.Tensor) -> int:
    """How many ranks hold a parameter together, each a part or a copy."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


def checkpoint_folder(config: TrainerConfig) -> Path:
    """Where a job keeps its checkpoints."""
    return config.run.dir / "checkpoints"
