"""Training and inference jobs whose model, task and data are named in a configuration file."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from d9d_loop.config.component import Component, import_function
from d9d_loop.config.preset import InferencePresetConfig, PresetConfig
from d9d_loop.inference.inference import Inference
from d9d_loop.job.trainer import Trainer

J = TypeVar("J", Trainer, Inference)


def preset_trainer(config: PresetConfig) -> Trainer:
    """Build the Trainer of a preset. Raise `UserError` if a component cannot be imported or called."""
    compute = config.compute_metrics
    return _configured(
        Trainer if compute is None else partial(Trainer, compute_metrics=import_function(compute, "compute_metrics")),
        config,
        evaluation_data=("evaluation_dataset", config.evaluation_dataset),
        optimizer=("optimizer_provider", config.optimizer_provider),
        lr_schedule=("lr_schedule_provider", config.lr_schedule_provider),
    )


def preset_inference(config: InferencePresetConfig) -> Inference:
    """Build the inference job of a preset. Raise `UserError` if a component cannot be imported or called."""
    return _configured(Inference, config)


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
