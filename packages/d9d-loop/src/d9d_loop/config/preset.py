"""Jobs defined entirely by a configuration file, which names the model, task and data by import path."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from d9d_loop.config.component import IMPORT_PATH, Component
from d9d_loop.config.config_source import split_words
from d9d_loop.config.inference_config import InferenceConfig
from d9d_loop.config.trainer_config import JobConfig, TrainerConfig
from d9d_loop.section import Section


class _Components(JobConfig):
    """Components that training and inference jobs name by import path."""

    model: Component = Field(description="Component that builds the model provider.")
    task: Component = Field(description="Component that builds the task.")
    dataset: Component = Field(description="Component that builds the data: a dataset, or in training a data provider.")
    collate: Component | None = Field(default=None, description="Component that builds the collate function.")
    subscribers: tuple[Component, ...] = Field(default=(), description="Components that build event subscribers.")


class PlanConfig(Section):
    """Check of the job's memory by the planner of `d9d-plan`, when `d9d-train` starts the job."""

    hardware: str | None = Field(
        default=None,
        description="Hardware of the job: a name such as h100-dgx, or a TOML file written by `d9d-plan --calibrate`. "
        "If the job does not fit into its memory, `d9d-train` prints a warning, with the nearest layout that fits.",
    )


class JobFileConfig(TrainerConfig):
    """Configuration of a training job that `d9d-train` reads from a file."""

    compute_metrics: str | None = Field(
        default=None,
        pattern=IMPORT_PATH,
        description="Function of all predictions of an evaluation that returns more values, as package.module:name.",
    )
    plan: PlanConfig = PlanConfig()


class PresetConfig(_Components, JobFileConfig):
    """Configuration of a training job that also names its model, task and data."""

    evaluation_dataset: Component | None = Field(default=None, description="Component that builds the evaluation data.")
    optimizer_provider: Component | None = Field(
        default=None, description="Component that builds the optimizer provider, which replaces `optimizer`."
    )
    lr_schedule_provider: Component | None = Field(
        default=None,
        description="Component that builds the learning-rate schedule, a function of the step; replaces `lr_schedule`.",
    )


class InferencePresetConfig(_Components, InferenceConfig):
    """Configuration of an inference job that also names its model, task and data."""


def look_beside_preset(arguments: Sequence[str] | None = None) -> None:
    """Prepend the current folder and the preset file's folder to `sys.path`, so that their modules can be imported."""
    file, _ = split_words(sys.argv[1:] if arguments is None else arguments)
    folders = [Path.cwd(), *([] if file is None else [Path(file).resolve().parent])]
    sys.path[:0] = [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]
