"""Configuration of a training job, as frozen pydantic models.

A subclass adds the settings of a particular job: `class PretrainConfig(TrainerConfig): model: Qwen3Params`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt

from d9d_dist import MeshConfig
from d9d_loop.config.config_source import parse_command_line
from d9d_loop.config.schedule_config import PipelineScheduleConfig, ScheduleConfig
from d9d_loop.config.section import Section
from d9d_loop.job.profiler import ProfileConfig
from d9d_loop.lr.lr_schedule import LrScheduleConfig, WarmupCosineConfig
from d9d_loop.optimizers.optimizer import AdamWConfig, OptimizerConfig
from d9d_loop.resilience import ResilienceConfig
from d9d_metrics import JsonlTrackerConfig, TrackerConfig
from d9d_state import Retention


class JobConfig(Section):
    """Base of job configurations, which are read from a file and the command line."""

    @classmethod
    def from_cli(cls, default_file: str | Path | None = None, arguments: Sequence[str] | None = None) -> Self:
        """Read the configuration from the command line `script.py [FILE] [--section.key VALUE ...]`.

        Values on the command line override those of the file. `--help` prints every key and exits; `--schema` prints
        the JSON Schema of configuration files and exits.

        Args:
            default_file: TOML, JSON or YAML file to read if the command line names none.
            arguments: Command line without the program's name; by default `sys.argv[1:]`.

        Returns:
            The validated configuration.

        Raises:
            UserError: If the file cannot be read or is malformed, or listing every invalid key.
        """
        return parse_command_line(cls, default_file, arguments)


class RunConfig(Section):
    """Output folder of a job."""

    folder: Path = Field(Path("runs"), description="Folder of all runs.")
    name: str = Field("run", min_length=1, description="Name of this run: its folder within the folder of all runs.")

    @property
    def dir(self) -> Path:
        """Output folder of this run: `folder / name`."""
        return self.folder / self.name


class BatchConfig(Section):
    """Global batch size and microbatch size."""

    global_size: PositiveInt = Field(description="Samples of one optimizer step, over all ranks.")
    microbatch_size: PositiveInt | None = Field(
        None, description="Samples of one forward pass on one rank; by default all of a rank's samples at once."
    )


class DataConfig(Section):
    """Sample order and data workers."""

    shuffle: bool = Field(True, description="Whether each epoch has a random order of its own.")
    num_workers: int = Field(0, ge=0, description="Processes that read samples; 0 reads in the training process.")
    prefetch: PositiveInt = Field(2, description="Steps that workers keep ready.")
    worker_timeout: PositiveFloat | None = Field(
        600.0, description="Seconds that a worker may take for a batch; null for any time."
    )


class GradientConfig(Section):
    """Gradient clipping before the optimizer step."""

    max_norm: PositiveFloat | None = Field(
        None, description="Largest global norm; larger gradients are scaled down. Null only measures the norm."
    )


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept: those that any of the `keep_` rules selects."""

    every: PositiveInt = Field(100, description="Steps between checkpoints; the last step is always saved.")
    background: bool = Field(
        True,
        description="Whether training goes on while a checkpoint is written, from a copy in host memory. The last one "
        "is always waited for.",
    )
    trainable_only: bool = Field(
        False,
        description="Whether parameters that are not trained are left out. A resumed job begins with the same initial "
        "weights, or without them the same seed, and refuses others.",
    )
    keep_last: PositiveInt | None = Field(2, description="Newest checkpoints to keep; all of them if null.")
    keep_every: PositiveInt | None = Field(
        None, description="Keep those whose step is a multiple of this, a multiple of `every`; none of them if null."
    )
    keep_best: int = Field(0, ge=0, description="Checkpoints with the best evaluation to keep.")
    best_by: str = Field("loss", description="Which value of the evaluation says how good a checkpoint is.")
    higher_is_better: bool = Field(False, description="Whether a larger value is a better one.")

    @property
    def retention(self) -> Retention:
        """Retention rules for the checkpoint store."""
        return Retention(
            last=self.keep_last,
            every=self.keep_every,
            best=self.keep_best,
            higher_is_better=self.higher_is_better,
        )


class EvaluationConfig(Section):
    """Interval and number of samples of evaluations. Has no effect without evaluation data."""

    every: PositiveInt = Field(100, description="Steps between evaluations; the last step is always evaluated.")
    num_samples: PositiveInt | None = Field(None, description="How many samples, evenly spaced; all of them if null.")


class PipelineConfig(Section):
    """Pipeline schedule. Has no effect if the mesh has one pipeline rank."""

    schedule: PipelineScheduleConfig = Field(
        ScheduleConfig.model_validate({}), description="In which order ranks compute; see the gallery of schedules."
    )
    draw: bool = Field(
        True,
        description="Whether to draw the schedule, as `schedule.png` before the first step and, measured in the "
        "second, as `schedule_measured.png`.",
    )


class LoggingConfig(Section):
    """Tracking interval, progress bar and drawings."""

    every: PositiveInt = Field(10, description="Steps between tracked values; the first and last step are tracked too.")
    progress: bool = Field(True, description="Whether to draw a progress bar, where there is a terminal.")
    draw_lr_schedule: bool = Field(
        False,
        description="Whether to draw the learning rate of all steps before the first, as `lr_schedule.png`.",
    )


class HostConfig(Section):
    """Settings of the Python process of each rank."""

    collect_garbage_every: PositiveInt | None = Field(
        50,
        description="Steps between collections of Python's cyclic garbage, on all ranks together; null: as it comes.",
    )


class TrainerConfig(JobConfig):
    """Configuration of a training job."""

    steps: PositiveInt = Field(description="Optimizer steps of the whole job, those before a resume included.")
    batch: BatchConfig
    seed: int = Field(0, ge=0, description="Seed of initial weights, sample order and dropout.")
    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    pipeline: PipelineConfig = PipelineConfig.model_validate({})
    data: DataConfig = DataConfig()
    optimizer: Annotated[OptimizerConfig, Field(description="The optimizer and its hyper-parameters.")] = AdamWConfig()
    lr_schedule: Annotated[LrScheduleConfig, Field(description="The learning rate over steps.")] = WarmupCosineConfig()
    gradients: GradientConfig = GradientConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    host: HostConfig = HostConfig()
    profile: ProfileConfig = ProfileConfig.model_validate({})
    resilience: ResilienceConfig = ResilienceConfig.model_validate({})
    trackers: tuple[TrackerConfig, ...] = Field((JsonlTrackerConfig(),), description="Where values are tracked.")
    initial_weights: Path | None = Field(
        None, description="Folder in the Hugging Face layout to start from, instead of random weights."
    )
    export: bool = Field(True, description="Whether to write the trained model to `export/` in the run's folder.")
