"""Engines that are built from a configuration, for the tests of this folder."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d9d_loop import Engine, EngineConfig, Loss, Task

Batch = dict[str, Tensor]


class Squares(Task):
    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss(outputs.square().sum(), weight=len(outputs))


TASK = Squares()
BATCHES = [{"x": torch.tensor([[1.0, 2.0, 3.0]])}, {"x": torch.tensor([[0.5, 0.0, -1.0]])}]
NAN = [{"x": torch.full((1, 3), torch.nan)}]


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"run": {"folder": folder}, "health": {"enabled": False}, "optimizer": {"learning_rate": 0.1}, **settings}
    )


def opened(folder: Path, **settings: Any) -> Any:
    return Engine.open(config_of(folder, **settings), model=lambda stage: nn.Linear(3, 2), task=TASK)


def take_step(engine: Engine, learning_rate: float | None = None) -> None:
    engine.forward_backward(BATCHES, TASK.loss)
    engine.step(learning_rate)


def values(engine: Engine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.model.parameters()]
