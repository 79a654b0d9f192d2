"""Checks of a training job, run before a process group starts or a file is written."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from d9d_dist import StageInfo, UserError, read_launch
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data import DataProvider, SampleStream
from d9d_loop.data.batches import Samples
from d9d_loop.job.job_check import check_data, check_degrees, check_weights, check_writable
from d9d_loop.job.job_state import frozen_digest_of
from d9d_loop.job.model_plan import ModelPlan, build_program, check_stages
from d9d_loop.model.built_model import build_model
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_metrics import check_trackers, compute_metrics
from d9d_pipeline import Schedule
from d9d_state import (
    CheckpointInfo,
    CheckpointStore,
    JsonValue,
    StateError,
    StateMapper,
    check_same_model,
)


@dataclass(frozen=True, slots=True)
class JobPlan(ModelPlan):
    """Checked plan of a training job, derived from its configuration and the environment.

    Attributes:
        export_mapper: State mapper from the model's weights to the exported ones; `None` if the names are the same or
            there is no export.
        microbatch_size: Samples of a microbatch on one data-parallel rank.
        num_microbatches: Microbatches of a step on one data-parallel rank.
        stream: Training samples in the order of training.
        evaluation_data: Held-out samples; `None` without evaluation.
    """

    export_mapper: StateMapper | None
    microbatch_size: int
    num_microbatches: int
    stream: SampleStream
    evaluation_data: Samples | None


def check_job(
    config: TrainerConfig,
    *,
    provider: ModelProvider,
    task: Task,
    data: DataProvider,
    optimizer_check: Callable[[nn.Module], None] = lambda _model: None,
    schedule: Schedule | None = None,
) -> JobPlan:
    """Check a training job and plan it. No collectives; writes no files.

    Args:
        config: The job's configuration.
        provider: Builds the model.
        task: Prepares inputs and computes the loss.
        data: Provides training and evaluation data.
        optimizer_check: Called with the whole model, usually on `meta`; raises `UserError` if the optimizer does not
            fit it.
        schedule: Pipeline schedule; by default the one of the configuration.

    Returns:
        The plan of the job on this rank.

    Raises:
        UserError: If a check fails. The message names the field, the value, the expected value and the remedy.
    """
    launch = read_launch()
    mesh = config.mesh.resolve(launch.world_size)
    check_degrees(mesh, task)
    dp_size = mesh.data_parallel_replicate * mesh.data_parallel_shard
    microbatch_size = _check_batch(config, dp_size)
    num_microbatches = config.batch.global_size // (dp_size * microbatch_size)
    schedule = schedule or config.pipeline.schedule.build()
    program = build_program(schedule, num_ranks=mesh.pipeline_parallel, num_microbatches=num_microbatches)
    stream, evaluation_data = data.training(seed=config.seed), data.evaluation()
    if evaluation_data is not None:
        check_data(evaluation_data, "evaluation data")
    _check_retention(config, task, evaluates=evaluation_data is not None)
    check_trackers(config.trackers)
    check_writable(config.run.dir)
    built = build_model(provider, StageInfo(), seed=config.seed, keep_values=launch.world_size == 1)
    model = built.module
    optimizer_check(model)
    needs_initial_weights = _check_checkpoint(config, model, data_identity=stream.identity())
    export_mapper = _export_mapper(provider, model) if config.export else None
    weights = (config.initial_weights or provider.initial_weights) if needs_initial_weights else None
    load_mapper = None if weights is None else provider.load_mapper(model, weights)
    if weights is not None:
        check_weights("initial_weights", weights, load_mapper, built)
    cuts = mesh.context_parallel_shard * mesh.context_parallel_replicate > 1  # inputs() then expects split sequences
    shared_names = check_stages(
        provider,
        model,
        program,
        seed=config.seed,
        stages_per_rank=schedule.stages_per_rank,
        inputs=None if cuts else lambda: task.inputs(_first_batch(stream, data, microbatch_size)),
    )
    return JobPlan(
        launch,
        mesh,
        schedule,
        program,
        weights,
        load_mapper,
        shared_names,
        built,
        export_mapper,
        microbatch_size,
        num_microbatches,
        stream,
        evaluation_data,
    )


def _export_mapper(provider: ModelProvider, model: nn.Module) -> StateMapper | None:
    mapper = provider.state_mapper(model)
    try:
        return mapper and mapper.inverse()
    except ValueError as error:
        raise UserError(
            f"export = true, but the provider's state mapper has no inverse: {error} Add an inverse, or use "
            "--export false."
        ) from None


def _first_batch(stream: SampleStream, data: DataProvider, size: int) -> Any:
    return data.collate([stream.read(entry) for entry in stream.cursor().take(size)])


def _check_batch(config: TrainerConfig, dp_size: int) -> int:
    """Return the microbatch size.

    Raises:
        UserError: If the global batch is not divisible by the data-parallel ranks times the microbatch size.
    """
    total, size = config.batch.global_size, config.batch.microbatch_size
    unit = dp_size if size is None else dp_size * size
    if total % unit:
        what = f"{dp_size} data-parallel ranks" + ("" if size is None else f" x batch.microbatch_size = {size}")
        below, above = total // unit * unit, (total // unit + 1) * unit
        raise UserError(
            f"batch.global_size = {total} cannot be divided evenly over {what}; expected a multiple of {unit}. "
            f"Use {f'{below} or ' if below else ''}{above}, or change the degrees."
        )
    return total // dp_size if size is None else size


def _check_retention(config: TrainerConfig, task: Task, *, evaluates: bool) -> None:
    """Check the retention of checkpoints.

    Raises:
        UserError: If a retention option has no effect or does not match the steps of saves and evaluations, or
            `best_by` is not a metric of the evaluation.
    """
    checkpoint = config.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        raise UserError(
            f"checkpoint.keep_every = {checkpoint.keep_every} is not a multiple of checkpoint.every = "
            f"{checkpoint.every}, so most of those steps have no checkpoint; expected a multiple. Change one of the "
            "two."
        )
    if checkpoint.keep_last is None and (checkpoint.keep_every is not None or checkpoint.keep_best):
        raise UserError(
            "checkpoint.keep_last is null, which keeps every checkpoint; expected a number beside keep_every or "
            "keep_best. Set it, or remove them."
        )
    if checkpoint.keep_best == 0:
        return
    # New metrics can be computed without data, which yields the names of their values.
    names = {"loss", *compute_metrics(task.metrics(), over=None)}
    if not evaluates or checkpoint.best_by not in names:
        found = f"evaluations give {', '.join(sorted(names))}" if evaluates else "there are no evaluation data"
        raise UserError(
            f"checkpoint.keep_best = {checkpoint.keep_best} by {checkpoint.best_by!r}, but {found}; expected a value "
            "of the evaluation. Change --checkpoint.best_by, pass evaluation data, or set keep_best to 0."
        )
    if checkpoint.every % config.evaluation.every:
        raise UserError(
            f"checkpoint.every = {checkpoint.every} is not a multiple of evaluation.every = {config.evaluation.every}, "
            "so checkpoints would be ranked by older evaluations; expected a multiple if keep_best is set."
        )


def _check_checkpoint(config: TrainerConfig, model: nn.Module, *, data_identity: JsonValue) -> bool:
    """Check the newest readable checkpoint against the job; return True if the job needs its initial weights.

    It needs them if there is no such checkpoint, or if checkpoints contain only trainable parameters.

    Raises:
        UserError: If the checkpoint has another model, more steps than the job, or other data.
    """
    info = next(filter(_is_readable, CheckpointStore(checkpoint_folder(config)).complete()), None)
    if info is None:
        return True
    trainable_only = frozen_digest_of(info) is not None
    check_same_model(info, model, trainable_only=trainable_only)
    if info.step > config.steps:
        raise UserError(
            f"steps = {config.steps}, but the run in {config.run.dir} has already completed {info.step}. "
            f"Use --steps {info.step} or more to continue it, or --run.name for a new run."
        )
    _check_same_order(config, info, data_identity)
    return trainable_only or config.checkpoint.trainable_only


def _is_readable(info: CheckpointInfo) -> bool:
    """Return True if the metadata of a checkpoint is readable. Damaged checkpoints are skipped on resume."""
    try:
        return info.state is not None
    except StateError:
        return False


def _check_same_order(config: TrainerConfig, info: CheckpointInfo, identity: JsonValue) -> None:
    """Check that the data identity is that of the checkpoint: a change would skip some samples and repeat others.

    Raises:
        UserError: Lists the differences.
    """
    state: Any = info.state
    lines = list(_differences(state["data_identity"], identity, "data"))
    if lines:
        raise UserError(
            f"the run in {config.run.dir} was started with other training data, or in another order:\n"
            + "\n".join(lines)
            + "\nThese determine which samples it has read. Use the same data and seed, or --run.name for a new run."
        )


def _differences(before: JsonValue, now: JsonValue, name: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}")
    elif before != now:
        yield f"  {name} was {json.dumps(before)}, and now is {json.dumps(now)}"


def check_metric_names(task: Task) -> None:
    """Check that no metric of the task has the name of a value that the Trainer reports.

    Raises:
        UserError: Lists the metrics to rename.
    """
    own = {"loss", "grad_norm", "learning_rate", f"{task.weight_unit}_per_second", "step", "time", "config"}
    if taken := sorted(own & task.metrics().keys()):
        raise UserError(
            f"the task's metrics include {', '.join(taken)}, which the Trainer reports itself; rename them."
        )


def checkpoint_folder(config: TrainerConfig) -> Path:
    """Return the folder of a job's checkpoints."""
    return config.run.dir / "checkpoints"
