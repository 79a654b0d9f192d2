"""Configuration of a training job, as frozen pydantic models.

A subclass adds the settings of a particular job: `class PretrainConfig(TrainerConfig): model: Qwen3Params`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from d9d_dist import MeshConfig, UserError
from d9d_dist.precision import PrecisionName
from d9d_loop.config.config_source import parse_command_line
from d9d_loop.config.schedule_config import PipelineScheduleConfig, ScheduleConfig
from d9d_loop.lr.lr_schedule import LrScheduleConfig, WarmupCosineConfig
from d9d_loop.optimizers.ema import Ema
from d9d_loop.optimizers.optimizer import AdamWConfig, OptimizerConfig
from d9d_loop.resilience import ResilienceConfig
from d9d_loop.section import Section
from d9d_metrics import JsonlTrackerConfig, TrackerConfig
from d9d_state import Retention

TrainingPrecision: TypeAlias = Annotated[
    PrecisionName,
    Field(
        description="Dtype of forward and backward. bfloat16: with float32 parameters and gradient sums. parameters: "
        "the dtype of the parameters. autocast: that of torch.autocast in bfloat16 for each operator. auto: bfloat16 "
        "on accelerators, parameters on CPUs."
    ),
]
InitialWeights: TypeAlias = Annotated[
    Path | None, Field(description="Folder in the Hugging Face layout with the initial weights; null: random weights.")
]
Freeze: TypeAlias = Annotated[
    tuple[str, ...],
    Field(description="Regular expressions, searched in the names of parameters, which are not trained."),
]
ActivationCheckpointing: TypeAlias = Annotated[
    str | None,
    Field(
        description="Modules whose activations are recomputed in backward: blocks, for the modules of the outermost "
        "lists of modules, or a regular expression for their whole names; null: none."
    ),
]
CompileBackend: TypeAlias = Annotated[
    str | None,
    Field(description="Backend of `torch.compile` for the model's forward, such as inductor; null: no compilation."),
]
AverageConfig: TypeAlias = Annotated[
    Ema | None,
    Field(description="Exponential moving average of the weights, which evaluations and the export use; null: none."),
]


class JobConfig(Section):
    """Base of job configurations, which are read from a file and the command line."""

    @classmethod
    def from_cli(cls, default_file: str | Path | None = None, arguments: Sequence[str] | None = None) -> Self:
        """Read the configuration from the command line `script.py [FILE] [--section.key VALUE ...]`.

        Values on the command line override those of the file. `--help` prints an overview of the keys and
        exits; `--help optimizer` prints the details of one section and exits; `--schema` prints the JSON Schema of
        configuration files, for editors, and exits.

        Args:
            default_file: TOML, JSON or YAML file to read if the command line names none.
            arguments: Command line without the program's name; by default `sys.argv[1:]`.

        Raises:
            UserError: If the file cannot be read or is malformed, or keys are invalid; the message lists all of them.
        """
        return parse_command_line(cls, default_file, arguments)


class OutputConfig(Section):
    """Output folder of an [`Engine`][d9d_loop.Engine] or [`Inference`][d9d_loop.Inference]."""

    folder: Path = Field(default=Path("runs"), description="Folder that contains all runs.")
    name: str = Field(default="run", min_length=1, description="Name of this run, and of its folder.")

    @property
    def dir(self) -> Path:
        """Output folder of this run: `folder / name`."""
        return self.folder / self.name


class RunConfig(OutputConfig):
    """Output folder of a training job, and its relation to earlier starts."""

    from_scratch: bool = Field(
        default=False,
        description="Start at step 0 if the run has progress, but its checkpoints are missing; its figures and export "
        "are renamed. Has no effect if there is a checkpoint.",
    )
    adopt: bool = Field(
        default=False, description="Continue from a checkpoint of another run, or at the same position of other data."
    )
    on_failure: str | None = Field(
        default=None,
        description="Shell command that the rank that fails first runs; the status is in variables such as D9D_ERROR.",
    )
    on_completion: str | None = Field(
        default=None, description="Shell command that rank 0 runs after the last step and the export."
    )


class BatchConfig(Section):
    """Global batch size and microbatch size."""

    global_size: PositiveInt = Field(description="Samples per optimizer step, over all ranks.")
    microbatch_size: PositiveInt | None = Field(
        default=None, description="Samples per forward pass on one rank; by default all samples of the rank."
    )


class WorkerConfig(Section):
    """Data workers."""

    num_workers: int = Field(
        default=0, ge=0, description="Number of data worker processes; 0 reads samples in the training process."
    )
    prefetch: PositiveInt = Field(
        default=2, description="Number of steps (of batches in inference) that workers read ahead."
    )
    worker_timeout: PositiveFloat | None = Field(
        default=600.0, description="Timeout of a worker for one batch, in seconds; null disables it."
    )


class DataConfig(WorkerConfig):
    """Sample order and data workers."""

    shuffle: bool = Field(default=True, description="Shuffle the samples again in each epoch.")


class GradientConfig(Section):
    """Clipping of gradients before the optimizer step, and the dtype in which they accumulate."""

    max_norm: PositiveFloat | None = Field(
        default=None, description="Clip gradients to this global norm. Null computes the norm without clipping."
    )
    dtype: Literal["float32"] | None = Field(
        default=None,
        description="Dtype in which gradients accumulate over microbatches and ranks; by default the dtype of each "
        "parameter. Needs torch 2.15.",
    )
    reduce_each_microbatch: bool = Field(
        default=False,
        description="Reduce the gradients of sharded parameters after each microbatch instead of once per step. This "
        "needs memory only for gradient shards, but more communication.",
    )


class LocalTierConfig(Section):
    """Saves in the memory and on the local disks of the hosts, between checkpoints."""

    memory_every: PositiveInt | None = Field(
        default=None,
        description="Steps between saves in host memory, which remain when the job's processes exit; null: none.",
    )
    local_every: PositiveInt | None = Field(
        default=None, description="Steps between saves in `local_folder`; null: none."
    )
    local_folder: Path | None = Field(
        default=None, description="Folder on a local disk of each host, for the saves of `local_every`."
    )
    replicas: int = Field(
        default=1, ge=0, description="Number of other hosts that store a copy of each rank's part of these saves."
    )


class CheckpointConfig(LocalTierConfig):
    """Interval and retention of checkpoints. A checkpoint is kept if any of the `keep_` rules selects it."""

    every: PositiveInt = Field(default=100, description="Steps between checkpoints; the last step is always saved.")
    folder: str | None = Field(
        default=None,
        description="Folder or URL of an object store (s3://...), in which each run has a folder of checkpoints; null: "
        "`checkpoints` in the run folder.",
    )
    background: bool = Field(
        default=True,
        description="Write checkpoints in the background, from a copy in host memory. The job waits for the last "
        "checkpoint, and for those of steps that are evaluated.",
    )
    trainable_only: bool = Field(
        default=False,
        description="Save only trainable parameters. A resumed job must have the same `initial_weights`, or the same "
        "seed if it has none; otherwise it ends with an error.",
    )
    keep_last: PositiveInt | None = Field(
        default=2, description="Number of newest checkpoints to keep; null keeps all."
    )
    keep_every: PositiveInt | None = Field(
        default=None,
        description="Keep checkpoints at multiples of this number of steps, which must be a multiple of `every`; null: "
        "keep none for this reason.",
    )
    keep_best: int = Field(default=0, ge=0, description="Number of best checkpoints to keep, ranked by `best_by`.")
    best_by: str = Field(default="loss", description="Evaluation metric by which checkpoints are ranked.")
    higher_is_better: bool = Field(default=False, description="A larger value of `best_by` is better.")

    @property
    def retention(self) -> Retention:
        """Retention rules for the checkpoint store."""
        return Retention(
            last=self.keep_last, every=self.keep_every, best=self.keep_best, higher_is_better=self.higher_is_better
        )


class WatchedConfig(Section):
    """A value of the evaluations, and the number of evaluations without an improvement of it."""

    by: str = Field(default="loss", description="Value of the evaluation: loss, or a metric of the task.")
    patience: int = Field(default=3, ge=0, description="Number of evaluations without an improvement.")
    min_delta: NonNegativeFloat = Field(
        default=0.0, description="A value improves if it differs from the best one by more than this."
    )
    higher_is_better: bool = Field(default=False, description="A larger value of `by` is better.")


class EarlyStoppingConfig(WatchedConfig):
    """End of the job as complete, with its export, after `patience` evaluations in a row without an improvement."""

    patience: PositiveInt = Field(default=3, description="Number of evaluations without an improvement.")


class PlateauConfig(WatchedConfig):
    """Reduction of the learning rate after more than `patience` evaluations in a row without an improvement.

    The factors multiply `lr_schedule`, as torch's `ReduceLROnPlateau` with an absolute threshold.
    """

    factor: float = Field(default=0.1, gt=0, lt=1, description="Factor of the learning rate at each reduction.")
    min_factor: float = Field(default=0.0, ge=0, lt=1, description="Smallest product of all factors.")
    patience: int = Field(default=10, ge=0, description="Number of evaluations without an improvement.")
    cooldown: int = Field(default=0, ge=0, description="Evaluations after a reduction that are not counted.")


class EvaluationConfig(Section):
    """Interval and number of samples of evaluations."""

    every: PositiveInt = Field(default=100, description="Steps between evaluations; the last step is always evaluated.")
    num_samples: PositiveInt | None = Field(
        default=None, description="Number of samples, a pseudorandom subset of the data; null uses all."
    )
    only: bool = Field(
        default=False,
        description="Only evaluate, without training: the newest checkpoint, or the initial weights if there is none.",
    )


class PipelineConfig(Section):
    """Pipeline schedule. With one pipeline rank, a schedule with several stages per rank is an error."""

    schedule: PipelineScheduleConfig = Field(
        default=ScheduleConfig.model_validate({}), description="The pipeline schedule; see the gallery of schedules."
    )
    draw: bool = Field(
        default=True,
        description="Plot the schedule: `schedule.png` before the first step, and `schedule_measured.png` with the "
        "times of the second step.",
    )


class LoggingConfig(Section):
    """Tracking interval, progress bar, HTML report and plots."""

    every: PositiveInt = Field(
        default=10, description="Steps between tracked values; the first and last step are tracked too."
    )
    progress: bool = Field(default=True, description="Show a progress bar if the output is a terminal.")
    stamps: bool = Field(
        default=True, description="Prepend time and rank to each line of the log, unless the output is a terminal."
    )
    report: bool = Field(default=True, description="Write `report.html` at the end, from the values in metrics.jsonl.")
    peak_flops: PositiveFloat | None = Field(
        default=None,
        description="Peak FLOP/s of a device, for MFU; null: by its name, from `d9d_metrics.flops.PEAK_FLOPS`.",
    )
    draw_lr_schedule: bool = Field(
        default=False, description="Plot the learning rate of all steps as `lr_schedule.png`, before the first step."
    )


class ProfileConfig(Section):
    """Selection of the steps to profile, and options of the traces."""

    first_step: PositiveInt | None = Field(
        default=None, description="First step to profile; null disables the profiler."
    )
    steps: PositiveInt = Field(default=2, description="Number of consecutive steps per profile.")
    every: PositiveInt | None = Field(
        default=None, description="Steps from the start of one profile to the next; null: one profile."
    )
    record_shapes: bool = Field(default=False, description="Record the shapes of operator arguments.")
    profile_memory: bool = Field(default=False, description="Record memory allocations.")

    def begins_after(self, step: int) -> bool:
        """Return True if step `step + 1` is the first of a range of profiled steps."""
        if self.first_step is None:
            return False
        since = step + 1 - self.first_step
        return since == 0 or (self.every is not None and since > 0 and since % self.every == 0)


class HostConfig(Section):
    """Settings of the Python process of each rank."""

    collect_garbage_every: PositiveInt | None = Field(
        default=50,
        description="Steps between Python garbage collections on all ranks together; null: automatic collection.",
    )


class TrainerConfig(JobConfig):
    """Configuration of a training job."""

    steps: PositiveInt | None = Field(
        default=None,
        description="Total number of optimizer steps, including those before a resume; by default, as many as finite "
        "training data has samples for.",
    )
    epochs: PositiveInt | None = Field(
        default=None,
        description="Number of epochs over a training dataset; each ends with a batch of the remaining samples. "
        "Null repeats the dataset without end, in full batches. Not for data providers: their streams set the number.",
    )
    batch: BatchConfig
    seed: int = Field(default=0, ge=0, description="Seed of initial weights, sample order and dropout.")
    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    precision: TrainingPrecision = "auto"
    pipeline: PipelineConfig = PipelineConfig.model_validate({})
    data: DataConfig = DataConfig()
    optimizer: Annotated[OptimizerConfig, Field(description="The optimizer and its hyperparameters.")] = AdamWConfig()
    average: AverageConfig = None
    lr_schedule: Annotated[LrScheduleConfig, Field(description="Learning-rate schedule.")] = WarmupCosineConfig()
    gradients: GradientConfig = GradientConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stopping: EarlyStoppingConfig | None = None
    plateau: PlateauConfig | None = None
    logging: LoggingConfig = LoggingConfig()
    host: HostConfig = HostConfig()
    profile: ProfileConfig = ProfileConfig.model_validate({})
    resilience: ResilienceConfig = ResilienceConfig.model_validate({})
    trackers: tuple[TrackerConfig, ...] = Field(
        default=(JsonlTrackerConfig(),), description="Trackers that receive the metrics."
    )
    initial_weights: InitialWeights = None
    freeze: Freeze = ()
    activation_checkpointing: ActivationCheckpointing = None
    compile: CompileBackend = None
    rehearsal: bool = Field(
        default=True,
        description="Run the first microbatch on fake tensors before the job starts, to find mistakes in its code.",
    )
    export: bool | Literal["best"] = Field(
        default=True,
        description="Write the trained model to `export/` in the run folder. best: the weights of the best checkpoint, "
        "by `checkpoint.best_by`; needs `checkpoint.keep_best`.",
    )

    @model_validator(mode="after")
    def _schedule_knows_the_peak(self) -> Self:
        peak = getattr(self.lr_schedule, "peak_learning_rate", None)
        learning_rate = getattr(self.optimizer, "learning_rate", None)
        if peak is not None and peak != learning_rate:
            raise ValueError(
                f"lr_schedule.peak_learning_rate = {peak}, but optimizer.learning_rate = {learning_rate}; expected the "
                "same value"
            )
        return self

    def split_over(self, world_size: int) -> tuple[MeshConfig, int]:
        """Return the mesh without -1, and the microbatch size of each of its data-parallel ranks.

        Raises:
            UserError: If the degrees do not fit the number of ranks, or the global batch cannot be divided evenly.
        """
        mesh = self.mesh.resolve(world_size)
        dp_size = mesh.data_parallel_replicate * mesh.data_parallel_shard
        total, size = self.batch.global_size, self.batch.microbatch_size
        unit = dp_size if size is None else dp_size * size
        if total % unit:
            what = f"{dp_size} data-parallel ranks" + ("" if size is None else f" x batch.microbatch_size = {size}")
            below, above = total // unit * unit, (total // unit + 1) * unit
            raise UserError(
                f"batch.global_size = {total} cannot be divided evenly over {what}; expected a multiple of {unit}. "
                f"Use {f'{below} or ' if below else ''}{above}, or change the degrees."
            )
        return mesh, total // dp_size if size is None else size
