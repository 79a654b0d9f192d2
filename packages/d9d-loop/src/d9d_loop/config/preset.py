"""Jobs defined by a configuration file alone: it names the model, task and data by import path."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from d9d_loop.config.component import Component
from d9d_loop.config.config_source import split_words
from d9d_loop.config.inference_config import InferenceConfig
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.event_bus import Events
from d9d_loop.inference.inference import Inference
from d9d_loop.job.trainer import Trainer


class PresetConfig(TrainerConfig):
    """Configuration of a training job that also names its model, task and data."""

    model: Component = Field(description="Builds the model provider.")
    task: Component = Field(description="Builds the task.")
    dataset: Component = Field(description="Builds the training data: a dataset, or a data provider.")
    evaluation_dataset: Component | None = Field(None, description="Builds the evaluation data.")
    collate: Component | None = Field(None, description="Builds the collate function.")
    optimizer_provider: Component | None = Field(
        None, description="Builds the optimizer provider, which replaces `optimizer`."
    )
    lr_schedule_provider: Component | None = Field(
        None, description="Builds the learning rate schedule, a function of the step, which replaces `lr_schedule`."
    )
    subscribers: tuple[Component, ...] = Field((), description="Build objects whose methods handle events.")


class InferencePresetConfig(InferenceConfig):
    """Configuration of an inference job that also names its model, task and data."""

    model: Component = Field(description="Builds the model provider.")
    task: Component = Field(description="Builds the inference task.")
    dataset: Component = Field(description="Builds the data.")
    collate: Component | None = Field(None, description="Builds the collate function.")
    subscribers: tuple[Component, ...] = Field((), description="Build objects whose methods handle events.")


def preset_trainer(config: PresetConfig) -> Trainer:
    """Build the Trainer of a preset.

    Raises:
        UserError: If a component cannot be imported, or cannot be called with the preset's arguments.
    """
    trainer = Trainer(
        config,
        model=config.model.build("model"),
        data=config.dataset.build("dataset"),
        task=config.task.build("task"),
        **_built(
            evaluation_data=("evaluation_dataset", config.evaluation_dataset),
            collate=("collate", config.collate),
            optimizer=("optimizer_provider", config.optimizer_provider),
            lr_schedule=("lr_schedule_provider", config.lr_schedule_provider),
        ),
    )
    _subscribe(trainer.events, config.subscribers)
    return trainer


def preset_inference(config: InferencePresetConfig) -> Inference:
    """Build the inference job of a preset.

    Raises:
        UserError: If a component cannot be imported, or cannot be called with the preset's arguments.
    """
    inference = Inference(
        config,
        model=config.model.build("model"),
        data=config.dataset.build("dataset"),
        task=config.task.build("task"),
        **_built(collate=("collate", config.collate)),
    )
    _subscribe(inference.events, config.subscribers)
    return inference


def look_beside_preset(arguments: Sequence[str] | None = None) -> None:
    """Prepend the current folder and the preset file's folder to `sys.path`, so that their modules can be imported.

    Args:
        arguments: Command-line arguments without the program name; by default those of this process.
    """
    file, _ = split_words(sys.argv[1:] if arguments is None else arguments)
    folders = [Path.cwd(), *([] if file is None else [Path(file).resolve().parent])]
    sys.path[:0] = [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]


def _built(**parts: tuple[str, Component | None]) -> dict[str, Any]:
    """Build the components that a preset sets.

    Args:
        parts: For each keyword argument, the configuration key and the component; `None` if the key is not set.

    Returns:
        The built objects by keyword argument, without those that are not set.
    """
    return {name: part.build(key) for name, (key, part) in parts.items() if part is not None}


def _subscribe(events: Events, subscribers: Sequence[Component]) -> None:
    events.subscribe(*(each.build(f"subscribers.{number}") for number, each in enumerate(subscribers)))
