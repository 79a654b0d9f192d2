"""Configuration of an `Engine`, as a frozen pydantic model."""

from pathlib import Path

from pydantic import Field, PositiveInt

from d9d_dist import MeshConfig, PrecisionName
from d9d_loop.config.schedule_config import PipelineScheduleConfig, ScheduleConfig
from d9d_loop.config.trainer_config import GradientConfig, JobConfig, RunConfig
from d9d_loop.optimizers.optimizer import AdamWConfig, OptimizerConfig
from d9d_loop.resilience.resilience_config import BadStepConfig, HealthConfig, TimeoutConfig


class EngineConfig(JobConfig):
    """Configuration of an `Engine`. Data, steps and learning rates over steps are up to the caller."""

    seed: int = Field(default=0, ge=0, description="Seed of initial weights and dropout.")
    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    precision: PrecisionName = Field(
        default="auto",
        description="Dtype of forward and backward: bfloat16 with float32 parameters and gradient sums, or that of the "
        "parameters; auto: bfloat16 on accelerators.",
    )
    pipeline_schedule: PipelineScheduleConfig = Field(
        default=ScheduleConfig.model_validate({}), description="The pipeline schedule; see the gallery of schedules."
    )
    optimizer: OptimizerConfig = Field(default=AdamWConfig(), description="The optimizer and its hyperparameters.")
    gradients: GradientConfig = GradientConfig()
    keep_last: PositiveInt | None = Field(
        default=2, description="Number of newest checkpoints to keep; null keeps all."
    )
    bad_steps: BadStepConfig = BadStepConfig.model_validate({})
    health: HealthConfig = HealthConfig.model_validate({})
    timeouts: TimeoutConfig = TimeoutConfig.model_validate({})
    initial_weights: Path | None = Field(
        default=None, description="Folder in the Hugging Face layout with the initial weights; null: random weights."
    )
    progress: bool = Field(
        default=True, description="Show the progress of reading weights if the output is a terminal."
    )
