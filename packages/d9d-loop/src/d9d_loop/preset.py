"""Jobs that are configuration files and nothing else: they name what to train, or to run, by import path."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from d9d_loop.component import Component
from d9d_loop.config import TrainerConfig
from d9d_loop.config_source import split_words
from d9d_loop.event_bus import Events
from d9d_loop.inference import Inference
from d9d_loop.inference_config import InferenceConfig
from d9d_loop.trainer import Trainer


class PresetConfig(TrainerConfig):
    """The configuration of a training job, with its parts."""

    model: Component = Field(description="Makes the model provider.")
    task: Component = Field(description="Makes the task.")
    dataset: Component = Field(description="Makes the training data: a dataset, or a data provider.")
    evaluation_dataset: Component | None = Field(None, description="Makes the held-out data.")
    collate: Component | None = Field(None, description="Makes the function that makes a batch of samples.")
    optimizer_provider: Component | None = Field(
        None, description="Makes what builds the optimizer, in the place of `optimizer`."
    )
    lr_schedule_provider: Component | None = Field(
        None, description="Makes the learning rate's factor by step, in the place of `lr_schedule`."
    )
    subscribers: tuple[Component, ...] = Field((), description="Make objects whose methods handle events.")


class InferencePresetConfig(InferenceConfig):
    """The configuration of an inference job, with its parts."""

    model: Component = Field(description="Makes the model provider.")
    task: Component = Field(description="Makes the inference task.")
    dataset: Component = Field(description="Makes the data.")
    collate: Component | None = Field(None, description="Makes the function that makes a batch of samples.")
    subscribers: tuple[Component, ...] = Field((), description="Make objects whose methods handle events.")


def preset_trainer(config: PresetConfig) -> Trainer:
    """The Trainer of a preset.

    Raises:
        UserError: If a part of it cannot be imported, or be made with the arguments that the preset gives.
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
    """The inference of a preset.

    Raises:
        UserError: If a part of it cannot be imported, or be made with the arguments that the preset gives.
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
    """Let imports find what is in the current folder, and beside the preset that the command line names.

    Args:
        arguments: The command line without the program's name; that of this process by default.
    """
    file, _ = split_words(sys.argv[1:] if arguments is None else arguments)
    folders = [Path.cwd(), *([] if file is None else [Path(file).resolve().parent])]
    sys.path[:0] = [folder for folder in dict.fromkeys(map(str, folders)) if folder not in sys.path]


def _built(**parts: tuple[str, Component | None]) -> dict[str, Any]:
    """The parts that a preset has, each under the name of the argument that it is."""
    return {name: part.build(key) for name, (key, part) in parts.items() if part is not None}


def _subscribe(events: Events, subscribers: Sequence[Component]) -> None:
    events.subscribe(*(each.build(f"subscribers.{number}") for number, each in enumerate(subscribers)))
