"""Training jobs that are configuration files and nothing else: they name what to train by import path."""

from pydantic import Field

from d9d_loop.component import Component
from d9d_loop.config import TrainerConfig
from d9d_loop.trainer import Trainer


class PresetConfig(TrainerConfig):
    """The configuration of a training job, with its parts."""

    model: Component = Field(description="Makes the model provider.")
    task: Component = Field(description="Makes the task.")
    dataset: Component = Field(description="Makes the training data.")
    evaluation_dataset: Component | None = Field(None, description="Makes the held-out data.")
    collate: Component | None = Field(None, description="Makes the function that makes a batch of samples.")
    subscribers: tuple[Component, ...] = Field((), description="Make objects whose methods handle events.")


def preset_trainer(config: PresetConfig) -> Trainer:
    """The Trainer of a preset.

    Raises:
        UserError: If a part of it cannot be imported, or be made with the arguments that the preset gives.
    """
    optional = {}
    if config.evaluation_dataset is not None:
        optional["evaluation_data"] = config.evaluation_dataset.build("evaluation_dataset")
    if config.collate is not None:
        optional["collate"] = config.collate.build("collate")
    trainer = Trainer(
        config,
        model=config.model.build("model"),
        data=config.dataset.build("dataset"),
        task=config.task.build("task"),
        **optional,
    )
    subscribers = [each.build(f"subscribers.{number}") for number, each in enumerate(config.subscribers)]
    trainer.events.subscribe(*subscribers)
    return trainer
