"""`Trainer`: plans, builds and runs a training job. The components of a job also work without the Trainer.

FSDP and DTensor take as long to import as torch, so they are imported when a Trainer is constructed.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from d9d_dist import Launch, MeshConfig, UserError, read_launch
from d9d_dist.lazy_exports import paused_collection
from d9d_loop.config.trainer_config import BatchConfig, TrainerConfig
from d9d_loop.data import DataProvider, DatasetProvider, SampleStream
from d9d_loop.data.data_provider import provider_of
from d9d_loop.data.sample_stream import Collate, Samples
from d9d_loop.event_bus import Events, why_not_called
from d9d_loop.events import TrainResult
from d9d_loop.job.end_command import early_failure_reported
from d9d_loop.job.stamped_output import stamped_output
from d9d_loop.lr.lr_schedule import LrSchedule
from d9d_loop.model.model_provider import BuildFunction, ModelProvider, model_provider
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_loop.task import Task
from d9d_loop.user_frames import explained
from d9d_pipeline import Schedule

if TYPE_CHECKING:
    from d9d_loop.engine.reference import Reference
    from d9d_loop.job.job import Job
    from d9d_loop.job.plan import JobPlan
    from d9d_loop.job.predictions import ComputeMetrics


class Trainer:
    """Training of a model, in a single process or under torchrun with the same script.

    Attributes:
        events: Event bus. Subscribe with `trainer.events.on(StepDone, handler)`.

    Args:
        config: The job's configuration.
        model: A model provider, a module, or a function that builds a pipeline stage of the model. A module is copied
            with its values.
        data: A data provider, or a dataset of training samples, such as a list, a torch `Dataset` or a Hugging Face
            `Dataset`.
        task: Prepares inputs and computes the loss.
        evaluation_data: Held-out samples, or a finite stream of them, if `data` is a dataset. `None` disables
            evaluation.
        collate: Function that builds a batch from a list of samples, if `data` is a dataset.
        compute_metrics: Function of all predictions of an evaluation (`Task.predictions`), numpy arrays by name, that
            returns more values by name. It runs on one rank.
        reference: Frozen reference of the model, for losses that compare with it, such as DPO: a function such as
            `d9d_peft.adapters_off`, or "initial" for a copy of the initial weights in host memory. Before each step,
            and in evaluations, the batches get `Task.reference_values` of the reference. A job that resumes reads the
            initial weights again.
        optimizer: Function that builds the optimizer; by default the optimizer of the configuration.
        lr_schedule: Function of the step, counted from 0, that returns the learning rate relative to the peak; by
            default the schedule of the configuration.
        pipeline_schedule: Pipeline schedule; by default the one of the configuration.

    Raises:
        UserError: If an argument has the wrong type. Also if `evaluation_data` or `collate` is passed with a data
            provider, which has its own.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: ModelProvider | nn.Module | BuildFunction,
        data: DataProvider | Samples,
        task: Task,
        evaluation_data: Samples | SampleStream | None = None,
        collate: Collate | None = None,
        compute_metrics: "ComputeMetrics | None" = None,
        reference: "Reference | None" = None,
        optimizer: OptimizerProvider | None = None,
        lr_schedule: LrSchedule | None = None,
        pipeline_schedule: Schedule | None = None,
    ) -> None:
        _check_types(config, task)
        _check_functions(collate=collate, compute_metrics=compute_metrics, optimizer=optimizer, lr_schedule=lr_schedule)
        if not isinstance(pipeline_schedule, Schedule | None):
            raise UserError(
                f"got {pipeline_schedule!r} as pipeline_schedule; expected a schedule of d9d_pipeline, such as "
                "Interleaved1F1B(2). A name is a value of the configuration: pipeline.schedule."
            )
        self.events = Events(seed=config.seed)
        self._config = config
        with paused_collection():
            from d9d_loop.job.plan import plan_job  # noqa: PLC0415 - imports FSDP and DTensor

        self._plan = partial(
            plan_job,
            model=model_provider(model),
            data=provider_of(data, evaluation_data, collate, shuffle=config.data.shuffle, epochs=config.epochs),
            task=task,
            compute_metrics=compute_metrics,
            reference=reference,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            pipeline_schedule=pipeline_schedule,
        )

    def plan_for(
        self,
        launch: Launch,
        *,
        mesh: MeshConfig | None = None,
        microbatch_size: int | None = None,
        global_size: int | None = None,
    ) -> "JobPlan":
        """Check and plan the job for the rank and world size of `launch`; do not start it. No collectives or writes.

        Args:
            launch: Rank and world size.
            mesh: Other mesh than the configured one.
            microbatch_size: Other samples in a microbatch.
            global_size: Other samples in a step.

        Raises:
            UserError: If a check fails, as in `train`.
        """
        sizes = {"microbatch_size": microbatch_size, "global_size": global_size}
        batch = self._config.batch.model_copy(update={name: size for name, size in sizes.items() if size is not None})
        changes: dict[str, Any] = {"batch": batch} if mesh is None else {"batch": batch, "mesh": mesh}
        return self._plan(self._config.model_copy(update=changes), launch=launch)

    def train(self) -> TrainResult:
        """Run the job to its last step, resuming from the newest checkpoint; return the result, equal on every rank.

        Raises:
            UserError: If the configuration, model, data or environment is invalid. Most checks run before the process
                group starts.
            StateError: On every rank, if the run has checkpoints, but none is valid.
            BadStepError: On every rank, if a step was bad and the policy for bad steps is to stop.
            Stopped: If a signal or a slow host ended the job, after a checkpoint of its last step was saved.
        """
        rank = read_launch().rank
        with stamped_output(rank, enabled=self._config.logging.stamps):
            with early_failure_reported(self._config.run, rank), explained("the job cannot be built"):
                plan = self._plan(self._config)
            with paused_collection():
                from d9d_loop.job.training import train  # noqa: PLC0415 - imports FSDP and DTensor
            return train(plan, self.events)

    def export(self, folder: str | Path, *, step: int | None = None) -> TrainResult:
        """Export the checkpoint of a step to `folder/export`, on any number of ranks, without training. Collective.

        The job runs its handlers of `Finished`, with `folder` as `result.run_dir`. The model is sharded over all ranks,
        whatever the mesh of the job is. The data are not read.

        Args:
            folder: Folder to write.
            step: Step of a checkpoint that is kept; `None` for the best one by `checkpoint.best_by`.

        Raises:
            UserError: On every rank, if there is no such checkpoint, or as in `train`.
        """
        from d9d_loop.job.job_run import export_step  # noqa: PLC0415 - imports FSDP and DTensor
        from d9d_loop.job.resume_check import find_checkpoint  # noqa: PLC0415

        find_checkpoint(self._config)  # raises an error for a checkpoint of another run, which `adopt` would not
        size = read_launch().world_size
        no_data = DatasetProvider([None] * size, evaluation=[None])
        return self._run(
            partial(export_step, step=step, folder=Path(folder)),
            partial(self._plan, data=no_data, lr_schedule=lambda _step: 1.0),
            batch=BatchConfig(global_size=size, microbatch_size=1),
            run=self._config.run.model_copy(update={"adopt": True}),
            steps=sys.maxsize,
            epochs=None,
            export=True,
        )

    def import_checkpoint(
        self, path: str | Path, *, step: int | None = None, optimizer: OptimizerProvider | None = None
    ) -> TrainResult:
        """Write the first checkpoint of the run from one of another library, in one process.

        Then `train` continues on any number of ranks: the next step equals that of the checkpoint in weights, state of
        the optimizer, learning rate and, with the same order of samples, loss.

        Args:
            path: Folder of the Trainer of transformers, of Accelerate's `save_state` or of torch's DCP, which is
                unpickled and must be trusted; or a file of Lightning.
            step: Number of its steps, if it does not have it.
            optimizer: Function of the whole model that builds the optimizer of the checkpoint, if it has several groups
                that are not those of the Trainer of transformers.

        Raises:
            UserError: If weights or optimizer differ in names, counts, shapes or settings from those of the job; if the
                run has checkpoints; or as in `train`.
        """
        from d9d_loop.job.checkpoint_import import import_checkpoint  # noqa: PLC0415 - imports FSDP and DTensor

        run = partial(import_checkpoint, path=Path(path), step=step, optimizer=optimizer)
        return self._run(run, self._plan, average=None)  # an average starts at the imported weights

    def _run(
        self, action: Callable[["Job"], TrainResult], plan: Callable[[TrainerConfig], "JobPlan"], **changes: Any
    ) -> TrainResult:
        """Build the job of `plan`, sharded over all ranks, and run `action` instead of the training. Collective."""
        from d9d_loop.job.training import train  # noqa: PLC0415 - imports FSDP and DTensor

        changes |= {"mesh": MeshConfig(data_parallel_shard=-1), "rehearsal": False}
        stamps = self._config.logging.stamps
        with stamped_output(read_launch().rank, enabled=stamps), explained("the job cannot be built"):
            return train(plan(self._config.model_copy(update=changes)), self.events, action)


def _check_types(config: object, task: object) -> None:
    """Raise `UserError` unless the configuration is a `TrainerConfig` and the task is an instance of `Task`."""
    if not isinstance(config, TrainerConfig):
        raise UserError(
            f"got a {type(config).__name__} as config; expected a TrainerConfig. Use TrainerConfig.from_cli(file), or "
            "validate_config(TrainerConfig, values)."
        )
    if isinstance(task, type):
        raise UserError(f"got the class {task.__name__} as task; expected an instance. Pass {task.__name__}().")
    if not isinstance(task, Task):
        raise UserError(
            f"got a {type(task).__name__} as task; expected a Task of d9d_loop. Derive a class from Task, with the "
            "methods inputs(batch) and loss(outputs, batch)."
        )


def _check_functions(**functions: object) -> None:
    """Raise `UserError` for an argument that is an object, such as an optimizer, instead of a function."""
    arguments = {
        "collate": "a list of samples",
        "compute_metrics": "the predictions",
        "optimizer": "the model",
        "lr_schedule": "the step",
    }
    for name, function in functions.items():
        if function is None:
            continue
        if not callable(function):
            raise UserError(
                f"got a {type(function).__name__} as {name}; expected a function of {arguments[name]}. Pass "
                f"{name}=lambda ...: ..., or omit it."
            )
        if isinstance(function, type) and issubclass(function, Optimizer):
            raise UserError(
                f"got the class {function.__name__} as optimizer; expected a function of the model. Pass "
                f"optimizer=lambda model: {function.__name__}(model.parameters(), ...)."
            )
        if why_not_called(function) is not None:
            raise UserError(
                f"got a function as {name} that does not take one argument; expected a function of {arguments[name]}."
            )
