"""Configuration of an inference job, as a frozen pydantic model."""

from pathlib import Path

from pydantic import Field, PositiveInt

from d9d_dist import MeshConfig
from d9d_loop.config.trainer_config import DataConfig, JobConfig, LoggingConfig, RunConfig
from d9d_loop.resilience import HangConfig


class InferenceConfig(JobConfig):
    """Configuration of an inference job."""

    weights: Path | None = Field(
        None, description="Folder in the Hugging Face layout, such as a training's `export/`; null: initial values."
    )
    batch_size: PositiveInt = Field(description="Samples of one forward pass on one rank.")
    part_size: PositiveInt = Field(
        1024, description="Samples whose results are written at a time; what a restart may have to compute again."
    )
    seed: int = Field(0, ge=0, description="Seed of what the model draws, such as sampled tokens.")
    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig.model_validate({})
    data: DataConfig = DataConfig()
    resilience: HangConfig = HangConfig()
    logging: LoggingConfig = LoggingConfig()
