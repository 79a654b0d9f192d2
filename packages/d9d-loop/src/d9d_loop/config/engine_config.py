"""Configuration of an `Engine`, as a frozen pydantic model."""

from pydantic import Field, PositiveInt

from d9d_dist import MeshConfig
from d9d_loop.config.schedule_config import PipelineScheduleConfig, ScheduleConfig
from d9d_loop.config.trainer_config import (
    ActivationCheckpointing,
    AverageConfig,
    CompileBackend,
    Freeze,
    GradientConfig,
    InitialWeights,
    JobConfig,
    LocalTierConfig,
    OutputConfig,
    TrainingPrecision,
)
from d9d_loop.optimizers.optimizer import AdamWConfig, OptimizerConfig
from d9d_loop.resilience.resilience_config import BadStepConfig, HealthConfig, TimeoutConfig


class EngineConfig(JobConfig):
    """Configuration of an `Engine`. The caller supplies the data, the number of steps and the learning rates."""

    seed: int = Field(default=0, ge=0, description="Seed of initial weights and dropout.")
    run: OutputConfig = OutputConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    precision: TrainingPrecision = "auto"
    pipeline_schedule: PipelineScheduleConfig = Field(
        default=ScheduleConfig.model_validate({}), description="The pipeline schedule; see the gallery of schedules."
    )
    optimizer: OptimizerConfig = Field(default=AdamWConfig(), description="The optimizer and its hyperparameters.")
    average: AverageConfig = None
    gradients: GradientConfig = GradientConfig()
    keep_last: PositiveInt | None = Field(
        default=2, description="Number of newest checkpoints to keep; null keeps all."
    )
    tiers: LocalTierConfig = LocalTierConfig.model_validate({})
    bad_steps: BadStepConfig = BadStepConfig.model_validate({})
    health: HealthConfig = HealthConfig.model_validate({})
    timeouts: TimeoutConfig = Field(
        default=TimeoutConfig.model_validate({}),
        description="Timeouts of collectives. That of the start stays after the first step unless step_seconds is set, "
        "because a rank may work longer than others between steps.",
    )
    initial_weights: InitialWeights = None
    freeze: Freeze = ()
    activation_checkpointing: ActivationCheckpointing = None
    compile: CompileBackend = None
    progress: bool = Field(
        default=True, description="Show the progress of reading weights if the output is a terminal."
    )
