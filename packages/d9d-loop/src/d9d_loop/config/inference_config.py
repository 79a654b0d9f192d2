"""Configuration of an inference job, as a frozen pydantic model."""

from pathlib import Path

from pydantic import Field, PositiveInt

from d9d_dist import MeshConfig
from d9d_dist.precision import PrecisionName
from d9d_loop.config.trainer_config import JobConfig, LoggingConfig, OutputConfig, WorkerConfig
from d9d_loop.resilience import HangConfig


class InferenceConfig(JobConfig):
    """Configuration of an inference job."""

    weights: Path | None = Field(
        default=None,
        description="Folder in the Hugging Face layout, such as the `export/` of a run; null: initial weights.",
    )
    batch_size: PositiveInt = Field(description="Samples per forward pass on one rank.")
    part_size: PositiveInt = Field(
        default=1024,
        description="Samples per part: results are written part by part, and a restart repeats an unfinished part.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the model's random numbers, such as for sampling tokens.")
    run: OutputConfig = OutputConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    precision: PrecisionName = Field(
        default="auto",
        description="Dtype of forward. bfloat16: with float32 parameters. parameters: the dtype of the parameters. "
        "auto: bfloat16 on accelerators, parameters on CPUs.",
    )
    data: WorkerConfig = WorkerConfig()
    resilience: HangConfig = HangConfig()
    logging: LoggingConfig = LoggingConfig()
