"""Jobs defined by a configuration file alone, which names the model, task and data by import path."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from d9d_loop.config.component import Component
from d9d_loop.config.config_source import split_words
from d9d_loop.config.inference_config import InferenceConfig
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.inference.inference import Inference
from d9d_loop.job.trainer import Trainer

J = TypeVar("J", Trainer, Inference)


class PresetConfig(TrainerConfig):
    """Configuration of a training job that also names its model, task and data."""

    model: Component = Field(description="Builds the model provider.")
    task: Component = Field(description="Builds the task.")
    dataset: Component = Field(description="Builds the training data: a dataset, or a data provider.")
    evaluation_dataset: Component | None = Field(default=None, description="Builds the evaluation data.")
    collate: Component | None = Field(default=None, description="Builds the collate function.")
    optimizer_provider: Component | None = Field(
        default=None, description="Builds the optimizer provider, which replaces `optimizer`."
    )
    lr_schedule_provider: Component | None = Field(
        default=None,
        description="Builds the learning rate schedule, a function of the step, which replaces `lr_schedule`.",
    )
    subscribers: tuple[Component, ...] = Field(default=(), description="Build objects whose methods handle events.")


class InferencePresetConfig(InferenceConfig):
    """Configuration of an inference job that also names its model, task and data."""

    model: Component = Field(description="Builds the model provider.")
    task: Component = Field(description="Builds the inference task.")
    dataset: Component = Field(description="Builds the data.")
    collate: Component | None = Field(default=None, description="Builds the collate function.")
    subscribers: tuple[Component, ...] = Field(default=(), description="Build objects whose methods handle events.")


def preset_trainer(config: PresetConfig) -> Trainer:
    """Build the Trainer of a preset. Raise `UserError` if a component cannot be imported or called."""
    return _configured(
        Trainer,
        config,
        evaluation_data=("evaluation_dataset", config.evaluation_dataset),
        optimizer=("optimizer_provider", config.optimizer_provider),
        lr_schedule=("lr_schedule_provider", config.lr_schedule_provider),
    )


def preset_inference(config: InferencePresetConfig) -> Inference:
    """Build the inference job of a preset. Raise `UserError` if a component cannot be imported or called."""
    return _configured(Inference, config)


def look_beside_preset(arguments: Sequence[str] | None = None) -> None:
    """Prepend the current folder and the preset file's folder to `sys.path`, so that their modules can be imported."""
    file, _ = split_words(sys.argv[1:] if arguments is None else arguments)
    folders = [Path.cwd(), *([] if file is None else [Path(file).resolve().parent])]
    sys.path[:0] = [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]


def _configured(
    job: Callable[..., J], config: PresetConfig | InferencePresetConfig, **parts: tuple[str, Component | None]
) -> J:
    """Build the job of a preset. `parts` maps optional job arguments to their configuration key and component."""
    optional = {"collate": ("collate", config.collate), **parts}
    built = job(
        config,
        model=config.model.build("model"),
        data=config.dataset.build("dataset"),
        task=config.task.build("task"),
        **{name: part.build(key) for name, (key, part) in optional.items() if part is not None},
    )
    built.events.subscribe(*(each.build(f"subscribers.{number}") for number, each in enumerate(config.subscribers)))
    return built
