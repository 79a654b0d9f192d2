"""Checks of a job's configuration, data, folders and newest checkpoint, before a process group starts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from d9d_dist import MeshConfig, UserError
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data import DataProvider, DatasetProvider
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.job.earlier_run import check_owner, check_progress
from d9d_loop.job.job_state import frozen_digest_of
from d9d_loop.model.disk_mapper import export_mapper
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_metrics import compute_metrics, redact_secrets
from d9d_pipeline import Schedule
from d9d_state import CheckpointInfo, CheckpointStore, JsonValue, StateError, StateMapper, check_same_model


def check_num_samples(data: DataProvider, config: TrainerConfig) -> None:
    """Raise `UserError` if a dataset is smaller than the global batch, so that a step would repeat samples."""
    # With epochs, the last step has the remaining samples. For an empty dataset, another check raises.
    repeats = config.epochs is None and isinstance(data, DatasetProvider)
    if repeats and 0 < data.num_samples < config.batch.global_size:
        raise UserError(
            f"batch.global_size = {config.batch.global_size}, but the training data have {data.num_samples} samples, "
            "so each step would repeat samples; expected at most the size of the data. Use --batch.global_size "
            f"{data.num_samples} or less, or more data."
        )


def check_trainable(model: nn.Module) -> None:
    """Raise `UserError` if no parameter requires a gradient."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        found = f"all {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
        raise UserError(
            f"the model {type(model).__name__} has nothing to train: {found}; expected trainable parameters. Set "
            "requires_grad, register submodules as attributes or in nn.ModuleList, or inject adapters."
        )


def check_evaluation_only(config: TrainerConfig, *, evaluates: bool) -> None:
    """Raise `UserError` if a job only evaluates, but has no evaluation data."""
    if config.evaluation.only and not evaluates:
        raise UserError(
            "evaluation.only = true, but there are no evaluation data; expected some. Pass evaluation_data to the "
            "Trainer, or return them from DataProvider.evaluation."
        )


def check_schedule(schedule: Schedule, mesh: MeshConfig, *, name: str) -> None:
    """Raise `UserError` if a pipeline schedule with several stages per rank is chosen without pipeline ranks."""
    if mesh.pipeline_parallel == 1 and schedule.stages_per_rank > 1:
        raise UserError(
            f"pipeline.schedule = {name} has {schedule.stages_per_rank} stages on each rank, but "
            "mesh.pipeline_parallel = 1; expected several pipeline ranks. Set --mesh.pipeline_parallel, or remove "
            "pipeline.schedule."
        )


def check_writable(folder: Path) -> None:
    """Raise `UserError` if a folder, or its nearest existing parent, is a file or not writable. Creates nothing.

    Raises `StateError` if the file system is mounted read-only.
    """
    existing = folder.absolute()
    # os.access returns False if a parent folder is not searchable; Path.exists would raise.
    while not os.access(existing, os.F_OK):
        existing = existing.parent
    if os.statvfs(existing).f_flag & os.ST_RDONLY:  # such as a disk after an error: a restart may help
        raise StateError(f"run folder {folder}: {existing} is on a file system that is mounted read-only.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is a file, not a folder"
        raise UserError(
            f"run folder {folder}: {existing} {reason}. Choose another folder with --run.folder, or change permissions."
        )


def export_mapper_of(provider: ModelProvider, model: nn.Module) -> StateMapper | None:
    """Return the mapper of an export; raise `UserError` if there is none, or the mapper omits trained parameters."""
    try:
        return export_mapper(provider, model)
    except UserError as error:
        raise UserError(f"export = true, but {error} Or use --export false.") from None


def num_steps_of(config: TrainerConfig, stream: SampleStream) -> int:
    """Return the number of steps of a job.

    Raise `UserError` if the number of steps is unknown or the data has too few samples.
    """
    if stream.is_endless:
        if config.steps is None:
            raise UserError(
                "steps is missing, and the training data have no end; expected a number of steps or finite data. Set "
                "--steps, or --epochs 1 for one pass over a dataset, or pass epochs=1 to the stream."
            )
        return config.steps
    available = stream.num_batches(config.batch.global_size)
    if available == 0:
        raise UserError("the training data are empty; expected at least one sample. Check the path of the data.")
    if config.steps is not None and config.steps > available:
        raise UserError(
            f"steps = {config.steps}, but the finite training data have samples for {available} steps of "
            f"batch.global_size = {config.batch.global_size}; expected no more. Remove steps, or add epochs."
        )
    return config.steps or available


def microbatch_size_of(config: TrainerConfig, dp_size: int) -> int:
    """Return the microbatch size; raise `UserError` if the global batch cannot be divided evenly over the ranks."""
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


def check_retention(config: TrainerConfig, task: Task, *, evaluates: bool) -> None:
    """Raise `UserError` if a retention option has no effect, or `best_by` is not a value of the evaluation."""
    checkpoint = config.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        raise UserError(
            f"checkpoint.keep_every = {checkpoint.keep_every} is not a multiple of checkpoint.every = "
            f"{checkpoint.every}, so most of those steps have no checkpoint; expected a multiple. Change one of the "
            "two."
        )
    if checkpoint.keep_last is None and (checkpoint.keep_every is not None or checkpoint.keep_best):
        raise UserError(
            "checkpoint.keep_last is null, which keeps every checkpoint; expected a number if keep_every or "
            "keep_best is set. Set keep_last, or remove the others."
        )
    if checkpoint.keep_best == 0:
        return
    # New metrics can be computed without data, which yields the names of their values.
    names = {"loss", *compute_metrics(task.metrics(), over=None)}
    if not evaluates or checkpoint.best_by not in names:
        found = f"evaluations measure {', '.join(sorted(names))}" if evaluates else "there are no evaluation data"
        raise UserError(
            f"checkpoint.keep_best = {checkpoint.keep_best} by {checkpoint.best_by!r}, but {found}; expected a value "
            "of the evaluation. Change --checkpoint.best_by, pass evaluation data, or set keep_best to 0."
        )
    if checkpoint.every % config.evaluation.every:
        raise UserError(
            f"checkpoint.every = {checkpoint.every} is not a multiple of evaluation.every = {config.evaluation.every}, "
            "so some checkpoints would be ranked by the evaluation of an earlier step; expected a multiple if "
            "keep_best is set."
        )


def checkpoint_folder(config: TrainerConfig) -> str | Path:
    """Return the folder of a job's checkpoints, or its URL."""
    if config.checkpoint.folder is None:
        return config.run.dir / "checkpoints"
    return f"{config.checkpoint.folder.rstrip('/')}/{config.run.dir.name}"


_FREE = (
    *("steps", "run", "mesh", "pipeline", "checkpoint", "evaluation", "logging", "host", "profile", "resilience"),
    *("trackers", "export", "rehearsal", "plan"),
)
"""Keys of a configuration that a resumed run may change without an effect on its losses."""


def check_checkpoint(
    config: TrainerConfig, model: nn.Module, *, steps: int, data_identity: JsonValue, has_optimizer: bool
) -> tuple[bool, list[str]]:
    """Check the newest readable checkpoint against the job.

    With `has_optimizer`, the caller passed an optimizer, which replaces the configured one.

    Returns:
        True if the job needs its initial weights: if no checkpoint is readable, or if checkpoints contain only
        trainable parameters. And a line for each setting that affects the training and differs from the checkpoint's.

    Raises:
        UserError: If the checkpoint is of another run, model, data or kind of optimizer, or has more steps than the
            job. Also if there is no checkpoint, but the run folder has saved progress.
    """
    info = next(filter(_is_readable, CheckpointStore(checkpoint_folder(config)).complete()), None)
    if info is None:
        has_tiers = config.checkpoint.memory_every is not None or config.checkpoint.local_every is not None
        if not has_tiers and not _has_damaged(config):  # else the check is repeated after the search for a checkpoint
            check_progress(config, checkpoint_folder(config))
        return True, []
    check_owner(config, info)
    trainable_only = frozen_digest_of(info) is not None
    check_same_model(info, model, trainable_only=trainable_only)
    if info.step > steps and not config.evaluation.only:
        raise UserError(
            f"steps = {steps}, but the run in {config.run.dir} has already completed {info.step}. "
            f"Use --steps {info.step} or more to continue it, or --run.name for a new run."
        )
    state: Any = info.state
    lines = list(differences(state["data_identity"], data_identity, "data"))
    if lines:  # some samples would be skipped and others repeated
        raise UserError(
            f"the run in {config.run.dir} was started with other training data, or with another order of the data:\n"
            + "\n".join(lines)
            + "\nA resumed run must continue the same stream. Use the same data and seed, or --run.name for a new run."
        )
    before: dict[str, Any] = state["config"]
    now: dict[str, Any] = redact_secrets(config.model_dump(mode="json"))
    free = {*_FREE, "optimizer"} if has_optimizer else _FREE
    shared = [key for key in now if key in before and key not in free]
    if "optimizer" in shared and (kind := before["optimizer"]["kind"]) != now["optimizer"]["kind"]:
        raise UserError(
            f"optimizer.kind = {now['optimizer']['kind']}, but the run in {config.run.dir} has state of {kind} at step "
            f"{info.step}; expected the same optimizer. Use --optimizer.kind {kind}, or --run.name for a new run, "
            "which may start from the exported weights (--initial_weights)."
        )
    changes = [line for key in shared for line in differences(before[key], now[key], key, known_only=True)]
    return trainable_only or config.checkpoint.trainable_only, changes


def _has_damaged(config: TrainerConfig) -> bool:
    """Return True if the folder of checkpoints is not empty: a damaged checkpoint is an error of the start."""
    folder = Path(checkpoint_folder(config))
    return folder.is_dir() and any(path.name.startswith("step-") for path in folder.iterdir())


def _is_readable(info: CheckpointInfo) -> bool:
    """Return True if the metadata of a checkpoint is readable. Damaged checkpoints are skipped on resume."""
    try:
        return info.state is not None
    except StateError:
        return False


def differences(before: JsonValue, now: JsonValue, name: str, *, known_only: bool = False) -> Iterator[str]:
    """Yield a line with the dotted name of each value that differs between two JSON values.

    With `known_only`, keys that only one of the values has are ignored: versions of the configuration differ in keys.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            if not known_only or (key in before and key in now):
                below = f"{name}.{key}".lstrip(".")
                yield from differences(before.get(key), now.get(key), below, known_only=known_only)
    elif before != now:
        yield f"  {name} was {json.dumps(before)}, and now is {json.dumps(now)}"


def check_metric_names(task: Task) -> None:
    """Raise `UserError` if a metric of the task has the name of a value that the Trainer reports."""
    own = {"loss", "grad_norm", "learning_rate", "peak_memory_gib", f"{task.weight_unit}_per_second"}
    own |= {"step", "time", "config"}
    if taken := sorted(own & task.metrics().keys()):
        raise UserError(
            f"the task's metrics include {', '.join(taken)}, which the Trainer reports itself; rename them."
        )
