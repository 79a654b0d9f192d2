"""Checks of a job's configuration, data and folders, before a process group starts."""

from collections.abc import Mapping
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from d9d_dist import MeshConfig, UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data import DataProvider, DatasetProvider, Samples, SampleStream
from d9d_loop.lr.lr_schedule import LrSchedule
from d9d_loop.model.disk_mapper import export_mapper
from d9d_loop.model.model_check import stand_in_problem
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_loop.writable import check_writable
from d9d_metrics import Metric, compute_metrics
from d9d_pipeline import Schedule
from d9d_state import StateMapper
from d9d_state.model_save import check_export


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


def rest_of_epoch(config: TrainerConfig, data: DataProvider, steps: int) -> int:
    """Return the number of samples of the last step of an epoch, if it has fewer than the others; 0 without one."""
    size = config.batch.global_size
    if config.epochs is None or not isinstance(data, DatasetProvider) or steps * size < data.num_samples:
        return 0
    return data.num_samples % size


def check_stand_ins(model: nn.Module, config: TrainerConfig, *, rest: int, dp_size: int, microbatch_size: int) -> None:
    """Raise `UserError` if results of the model would include stand-ins at the end of an epoch."""
    total = config.batch.global_size
    if 0 < rest <= total - microbatch_size and (problem := stand_in_problem(model, dp_size)):
        raise UserError(
            f"the last step of an epoch has {rest} samples, too few for all microbatches of the {dp_size} "
            f"data-parallel ranks, and {problem} Or use --steps instead of --epochs, or a multiple of "
            f"batch.global_size = {total} samples."
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


def check_evaluation(config: TrainerConfig, data: Samples | SampleStream | None) -> None:
    """Raise `UserError` if a job is to evaluate, but its evaluation data are absent, empty or endless."""
    every = config.evaluation.every
    if data is None and every != type(config.evaluation).model_fields["every"].default:
        raise UserError(
            f"evaluation.every = {every}, but there are no evaluation data; expected some. Pass evaluation_data to the "
            "Trainer, return them from DataProvider.evaluation, or remove evaluation.every."
        )
    if config.evaluation.only and data is None:
        raise UserError(
            "evaluation.only = true, but there are no evaluation data; expected some. Pass evaluation_data to the "
            "Trainer, or return them from DataProvider.evaluation."
        )
    if isinstance(data, SampleStream):
        if data.is_endless and config.evaluation.num_samples is None:
            raise UserError(
                "the evaluation data are an endless stream; expected a finite one, or a number of samples. Pass "
                "epochs=1 to the stream that reads them, or set evaluation.num_samples."
            )
    elif data is not None and len(data) == 0:
        raise UserError("the evaluation data are empty; expected at least one sample. Check the path of the data.")


def check_schedule(schedule: Schedule, mesh: MeshConfig, *, name: str) -> None:
    """Raise `UserError` if a pipeline schedule with several stages per rank is chosen without pipeline ranks."""
    if mesh.pipeline_parallel == 1 and schedule.stages_per_rank > 1:
        raise UserError(
            f"pipeline.schedule = {name} has {schedule.stages_per_rank} stages on each rank, but "
            "mesh.pipeline_parallel = 1; expected several pipeline ranks. Set --mesh.pipeline_parallel, or remove "
            "pipeline.schedule."
        )


def export_mapper_of(provider: ModelProvider, model: nn.Module, config: TrainerConfig) -> StateMapper | None:
    """Return the mapper of an export, after a check of all that the export needs at the end of the job.

    Raises:
        UserError: If there is no mapper, or it omits trained parameters. Also if the folder, or a file to write beside
            the weights, would be an error of the export.
    """
    source, folder = config.initial_weights or provider.initial_weights, config.run.dir / "export"
    try:
        mapper = export_mapper(provider, model)
        check_writable(folder.resolve().parent)
        if not config.run.from_scratch:  # which renames an earlier export
            has_source = source is not None and source.is_dir()
            check_export(folder, extra_files=provider.export_files(), source=source if has_source else None)
    except UserError as error:
        raise UserError(f"export = true, but {error} Or use --export false.") from None
    return mapper


def check_learning_rates(schedule: LrSchedule, steps: int) -> None:
    """Raise `UserError` if the learning rate is not a number in the first step, or 0 in every step."""
    factors = map(schedule, range(steps))
    first = next(factors)
    if not isinstance(first, Real):
        raise UserError(f"the learning-rate schedule returned a {type(first).__name__}; expected a float.")
    if not first and not any(factors):
        raise UserError(
            f"the learning-rate schedule is 0 in each of the {steps} steps; expected a positive rate. Change "
            "lr_schedule, or the function that is passed as lr_schedule."
        )


def check_predictions(config: TrainerConfig, task: Task, *, evaluates: bool) -> None:
    """Raise `UserError` if a function of all predictions has no predictions, or cannot gather them."""
    if not evaluates:
        raise UserError("got compute_metrics without evaluation data; expected some. Pass some, or remove it.")
    if find_spec("numpy") is None:
        raise UserError(
            "compute_metrics gets arrays of the package numpy, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'numpy')}"
        )
    kind: Any = type(task)
    if kind.predictions is Task.predictions:
        raise UserError(
            f"got compute_metrics, but {kind.__name__} has no predictions; expected a method predictions(outputs, "
            'batch) that returns tensors by name, such as {"logits": outputs, "labels": batch["labels"]}. In a file of '
            "d9d-train, remove compute_metrics or dataset.packing."
        )
    if config.mesh.context_parallel_shard * config.mesh.context_parallel_replicate > 1:
        raise UserError(
            "got compute_metrics under context parallelism, where a rank has a part of each sample; expected whole "
            "samples. Set the context-parallel degrees to 1, or measure a metric of the task."
        )


def check_retention(config: TrainerConfig, task: Task | None, *, evaluates: bool) -> None:
    """Raise `UserError` if a retention option has no effect, or `best_by` is not a value of the evaluation.

    `task` is `None` if the names of the values are known only after an evaluation.
    """
    checkpoint = config.checkpoint
    _check_watched(config, task, evaluates=evaluates)
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
    if not checkpoint.keep_best and config.export != "best":
        return
    if not checkpoint.keep_best and checkpoint.keep_last is not None:
        raise UserError(
            "export = best, but checkpoint.keep_best = 0, so the best checkpoint is deleted; expected at least 1. "
            "Set --checkpoint.keep_best 1, or --export true."
        )
    if (found := _unmeasured(checkpoint.best_by, task, evaluates=evaluates)) is not None:
        raise UserError(
            f"checkpoints are ranked by {checkpoint.best_by!r}, but {found}; expected a value of the evaluation. "
            "Change --checkpoint.best_by, pass evaluation data, or set keep_best to 0 and export to true."
        )
    if checkpoint.every % config.evaluation.every:
        raise UserError(
            f"checkpoint.every = {checkpoint.every} is not a multiple of evaluation.every = {config.evaluation.every}, "
            "so some checkpoints would be ranked by the evaluation of an earlier step; expected a multiple if "
            "keep_best is set or export is best."
        )


def _check_watched(config: TrainerConfig, task: Task | None, *, evaluates: bool) -> None:
    """Raise `UserError` if early stopping or a plateau watches a value that is not measured."""
    for key in ("early_stopping", "plateau"):
        watched = getattr(config, key)
        if watched is not None and (found := _unmeasured(watched.by, task, evaluates=evaluates)) is not None:
            raise UserError(
                f"{key}.by = {watched.by!r}, but {found}; expected the name of a value that the evaluation "
                f"measures. Change --{key}.by, pass evaluation data, or remove {key}."
            )


def _unmeasured(name: str, task: Task | None, *, evaluates: bool) -> str | None:
    """Return what is measured instead if evaluations do not measure a value of this name, else `None`."""
    if not evaluates:
        return "there are no evaluation data"
    if task is None:
        return None
    # New metrics can be computed without data, which yields the names of their values.
    names = {"loss", *compute_metrics(task.metrics(), over=None)}
    return None if name in names else f"evaluations measure {', '.join(sorted(names))}"


def check_measured(config: TrainerConfig, values: Mapping[str, float]) -> None:
    """Raise `UserError` if an evaluation has no value of a name that ranks checkpoints or that a reaction watches."""
    ranks = config.checkpoint.keep_best or config.export == "best"
    keys = {"checkpoint.best_by": config.checkpoint.best_by} if ranks else {}
    keys |= {f"{key}.by": each.by for key in ("early_stopping", "plateau") if (each := getattr(config, key))}
    for key, name in keys.items():
        if name not in values:
            raise UserError(
                f"{key} = {name!r}, but evaluations measure {', '.join(sorted(values))}; expected one of these. Change "
                f"--{key}, or return {name!r} from compute_metrics."
            )


def checkpoint_folder(config: TrainerConfig) -> str | Path:
    """Return the folder of a job's checkpoints, or its URL."""
    if config.checkpoint.folder is None:
        return config.run.dir / "checkpoints"
    return f"{config.checkpoint.folder.rstrip('/')}/{config.run.dir.name}"


def check_metric_names(task: Task) -> None:
    """Raise `UserError` if the task's metrics are not metrics, or have the name of a value of the Trainer's reports."""
    metrics: object = task.metrics()
    if not isinstance(metrics, Mapping):
        found = "None (is a return missing?)" if metrics is None else f"a {type(metrics).__name__}"
        raise UserError(f"{type(task).__name__}.metrics returned {found}; expected a mapping from names to metrics.")
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise UserError(
                f"{type(task).__name__}.metrics returned a {type(metric).__name__} as {name}; expected a Metric of "
                "d9d_metrics. Derive a class from Metric."
            )
    own = {"loss", "grad_norm", "learning_rate", "peak_memory_gib", f"{task.weight_unit}_per_second"}
    own |= {"step", "time", "config", "flops_per_second", "mfu", "model_flops"}
    if taken := sorted(own & metrics.keys()):
        raise UserError(
            f"the task's metrics include {', '.join(taken)}, which the Trainer reports itself; rename them."
        )
