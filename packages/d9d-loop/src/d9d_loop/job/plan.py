"""Plan of a training job: each rank checks it independently, before a process group starts or a file is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from d9d_dist import DistributedContext, Launch, MeshConfig, read_launch
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data import DataProvider, SampleStream, Share, StreamLoader
from d9d_loop.data.contents import check_repeatable, identity_of
from d9d_loop.data.in_fork import read_apart
from d9d_loop.data.indexed_stream import held_out_stream
from d9d_loop.data.sample_stream import Entry, Samples
from d9d_loop.engine.code_digest import evaluation_digest, source_digests
from d9d_loop.engine.local_tiers import check_local_tiers
from d9d_loop.engine.optimizer_fit import optimizer_provider
from d9d_loop.engine.reference import Reference, check_reference
from d9d_loop.job.job_check import (
    check_evaluation,
    check_learning_rates,
    check_metric_names,
    check_num_samples,
    check_predictions,
    check_retention,
    check_schedule,
    check_stand_ins,
    check_trainable,
    export_mapper_of,
    rest_of_epoch,
)
from d9d_loop.job.predictions import ComputeMetrics
from d9d_loop.job.resume_check import Progress, check_checkpoint, check_data, find_checkpoint, num_steps_of, progress_of
from d9d_loop.lr.lr_schedule import LrSchedule
from d9d_loop.model.compiled_model import check_backend
from d9d_loop.model.model_check import check_parameters_are_saveable, check_trained_dtypes
from d9d_loop.model.model_options import ModelOptions
from d9d_loop.model.model_plan import ModelPlan, plan_model
from d9d_loop.model.model_provider import FunctionProvider, ModelProvider, ModuleProvider
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.task import BatchPlacement, Task
from d9d_loop.writable import check_writable
from d9d_metrics.trackers.selection import check_trackers
from d9d_pipeline import Schedule
from d9d_state import StateMapper

_NUM_REPEATED = 4
"""Number of samples that are read twice, to check that they are a function of their position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Checked plan of a training job: its configuration, the components, and the values derived from them.

    Attributes:
        resolved: The configuration as JSON.
        compute_metrics: Function of all predictions of an evaluation; `None` for none.
        reference: Reference of the model, whose values each batch gets; `None` for none.
        steps: Total number of optimizer steps.
        model: Layout of the model over the ranks.
        peak_learning_rate: That of the configuration; `None` with an optimizer of a function.
        lr_schedule: Function of the step that returns the learning rate relative to the peak.
        build_lr_schedule: Function of the number of steps that returns `lr_schedule`.
        microbatch_size: Samples of a microbatch on one data-parallel rank.
        num_microbatches: Microbatches of a step on one data-parallel rank.
        stream: Training samples in the order of training.
        first_entries: Function that returns the entries of the first microbatch, planned at the first call.
        evaluation_data: Held-out samples; `None` without evaluation.
        data_identity: Function that returns the identity of the training data, read at the first call.
        evaluation_identity: The same of the evaluation data.
        export_mapper: State mapper from the model's weights to the exported ones; `None` if the names are the same or
            there is no export.
        changes: A line for each change since the checkpoint from which the job resumes.
        rest: Number of samples of the last, shorter step of an epoch; 0 without one.
        is_complete: True if the newest checkpoint is that of the last step.
        code: Digests of the user's code, stored in each checkpoint.
    """

    config: TrainerConfig
    resolved: dict[str, JsonValue]
    steps: int
    model: ModelPlan
    task: Task
    data: DataProvider
    compute_metrics: ComputeMetrics | None
    reference: Reference | None
    optimizer: OptimizerProvider
    peak_learning_rate: float | None
    lr_schedule: LrSchedule
    build_lr_schedule: Callable[[int], LrSchedule]
    microbatch_size: int
    num_microbatches: int
    stream: SampleStream
    first_entries: Callable[[], list[Entry]]
    evaluation_data: Samples | SampleStream | None
    data_identity: Callable[[], JsonValue]
    evaluation_identity: Callable[[], JsonValue]
    export_mapper: StateMapper | None
    changes: list[str]
    rest: int
    is_complete: bool
    code: dict[str, str]

    def resumed_from(self, progress: Progress) -> "JobPlan":
        """Return the plan of the job with the number of steps that follows from the restored progress.

        It differs from this plan only if the restored checkpoint is not the newest readable one, and the global batch
        size has changed between the two.
        """
        steps = num_steps_of(self.config, self.stream, progress)
        if steps == self.steps:
            return self
        return replace(self, steps=steps, lr_schedule=self.build_lr_schedule(steps))

    def first_batch(self, size: int | None = None) -> Any:
        """Read the first `size` samples of training, by default a microbatch, and collate them."""
        return _read_batch(self.data, self.stream, self.first_entries, size)

    def loader(self, ctx: DistributedContext) -> StreamLoader:
        """Return the loader of this rank's microbatches of each step, on its device."""
        data, dp_rank, dp_size = self.config.data, ctx.coordinate("batch", "dp"), ctx.size("batch", "dp")
        return StreamLoader(
            self.stream,
            Share(self.microbatch_size, self.num_microbatches, dp_rank, dp_size),
            seed=self.config.seed,
            collate=self.data.collate,
            place=BatchPlacement(self.task, ctx),
            device=ctx.device,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
            timeout=data.worker_timeout,
            draws=self.data.draws,
        )

    def is_saved_after(self, step: int) -> bool:
        """Return True if a checkpoint is due after a step."""
        return step == self.steps or step % self.config.checkpoint.every == 0

    def is_saved_locally_after(self, step: int) -> bool:
        """Return True if a save in a local tier is due after a step."""
        periods = (self.config.checkpoint.memory_every, self.config.checkpoint.local_every)
        return step != self.steps and any(every is not None and step % every == 0 for every in periods)


def plan_job(
    config: TrainerConfig,
    *,
    model: ModelProvider,
    data: DataProvider,
    task: Task,
    compute_metrics: ComputeMetrics | None = None,
    reference: Reference | None = None,
    optimizer: OptimizerProvider | None = None,
    lr_schedule: LrSchedule | None = None,
    pipeline_schedule: Schedule | None = None,
    launch: Launch | None = None,
) -> JobPlan:
    """Check a training job and plan it. Takes the arguments of `Trainer`, as providers. No collectives or writes.

    `launch` has the rank and the world size of this process; by default it is read from the launcher's environment.

    Raises:
        UserError: If a check fails. The message names the field, the value, the expected value and the remedy.
    """
    check_metric_names(task)
    check_reference(reference)
    launch = launch or read_launch()
    mesh, microbatch_size = config.split_over(launch.world_size)
    dp_size = mesh.data_parallel_replicate * mesh.data_parallel_shard
    num_microbatches = config.batch.global_size // (dp_size * microbatch_size)
    check_writable(config.run.dir)
    if config.checkpoint.folder is not None and "://" not in config.checkpoint.folder:
        check_writable(Path(config.checkpoint.folder), section="checkpoint")
    info = find_checkpoint(config)
    stream, evaluation_data = _plan_data(config, data)
    evaluates = evaluation_data is not None
    if compute_metrics is not None:
        check_predictions(config, task, evaluates=evaluates)
    check_retention(config, None if compute_metrics is not None else task, evaluates=evaluates)
    data_identity, evaluation_identity = (
        _identity_function(each, config, what=f"the {what} data")
        for each, what in ((stream, "training"), (evaluation_data, "evaluation"))
    )
    if info is not None:
        check_data(info, data_identity(), config)
    steps = num_steps_of(config, stream, progress_of(info))
    check_trackers(config.trackers)
    if config.compile is not None:
        check_backend(config.compile)
    first_entries = cache(lambda: stream.cursor().take(microbatch_size))
    first_batch = partial(_read_batch, data, stream, first_entries)
    layout = plan_model(
        model,
        launch=launch,
        mesh=mesh,
        schedule=_plan_schedule(config, mesh, model, pipeline_schedule),
        num_microbatches=num_microbatches,
        seed=config.seed,
        task=task,
        first_batch=first_batch,
        options=ModelOptions(config.freeze, config.activation_checkpointing),
    )
    whole = layout.built.module
    check_trainable(whole)
    rest = rest_of_epoch(config, data, steps)
    check_stand_ins(whole, config, rest=rest, dp_size=dp_size, microbatch_size=microbatch_size)
    check_trained_dtypes(whole)
    check_parameters_are_saveable(whole)
    if data.draws:
        check_repeatable(partial(first_batch, _NUM_REPEATED), num_workers=config.data.num_workers)
        if evaluation_data is not None:
            held_out = held_out_stream(evaluation_data)
            entries = partial(held_out.cursor().take, _NUM_REPEATED)
            check_repeatable(partial(_read_batch, data, held_out, cache(entries)), num_workers=config.data.num_workers)
    build_optimizer = optimizer_provider(optimizer, config.optimizer, whole)
    weights = config.initial_weights or model.initial_weights
    code = source_digests(weights, has_adapters=model.is_exported_by_handler)
    now = code if info is None else {**code, **evaluation_digest(evaluation_identity())}
    needs_weights, changes = check_checkpoint(info, config, whole, has_optimizer=optimizer is not None, code=now)
    exports = config.export and not model.is_exported_by_handler
    export_mapper = export_mapper_of(model, whole, config) if exports else None
    if needs_weights or reference == "initial":
        layout = layout.with_weights("initial_weights", weights)
    build_lr_schedule = config.lr_schedule.build if lr_schedule is None else lambda _steps: lr_schedule
    factor = build_lr_schedule(steps)
    check_learning_rates(factor, steps)
    return JobPlan(
        config=config,
        resolved=config.model_dump(mode="json"),
        steps=steps,
        model=layout,
        task=task,
        data=data,
        compute_metrics=compute_metrics,
        reference=reference,
        optimizer=build_optimizer,
        peak_learning_rate=config.optimizer.learning_rate if optimizer is None else None,
        lr_schedule=factor,
        build_lr_schedule=build_lr_schedule,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        stream=stream,
        first_entries=first_entries,
        evaluation_data=evaluation_data,
        data_identity=data_identity,
        evaluation_identity=evaluation_identity,
        export_mapper=export_mapper,
        changes=changes,
        rest=rest,
        is_complete=info is not None and info.step == steps,
        code=code,
    )


def _read_batch(
    data: DataProvider, stream: SampleStream, entries: Callable[[], list[Entry]], size: int | None = None
) -> Any:
    return data.collate([stream.read(entry) for entry in entries()[:size]])


def _identity_function(
    data: Samples | SampleStream | None, config: TrainerConfig, *, what: str
) -> Callable[[], JsonValue]:
    """Return a function that returns the identity of data, which its first call reads; `what` names them."""
    return cache(partial(read_apart, partial(identity_of, data), num_workers=config.data.num_workers, what=what))


def _plan_schedule(config: TrainerConfig, mesh: MeshConfig, model: ModelProvider, given: Schedule | None) -> Schedule:
    """Return the pipeline schedule: the given one, or else the configured one, which is checked for whole models."""
    if given is not None:
        return given
    schedule = config.pipeline.schedule.build()
    if isinstance(model, FunctionProvider | ModuleProvider):
        check_schedule(schedule, mesh, name=config.pipeline.schedule.kind)
    return schedule


def _plan_data(config: TrainerConfig, data: DataProvider) -> tuple[SampleStream, Samples | SampleStream | None]:
    """Check the data; return the training samples and the evaluation data."""
    check_num_samples(data, config)
    stream, evaluation_data = data.training(seed=config.seed), data.evaluation()
    check_evaluation(config, evaluation_data)
    check_local_tiers(config.checkpoint, section="checkpoint", every=config.checkpoint.every)
    return stream, evaluation_data
