"""Passes over finite data: the steps of a plain loop, with a smaller last step in each epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError, read_launch
from d9d_dist.testing import full_parameters, run_ranks
from d9d_loop import Finished, Loss, Task, Trainer, TrainerConfig
from d9d_loop.data import DatasetProvider, IndexedStream

Batch = dict[str, Tensor]
NUM_SAMPLES, GLOBAL_SIZE = 11, 4
RATE = 0.1


class _Squares(Task):
    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


def _data() -> list[Batch]:
    draws = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(size, generator=draws, dtype=torch.float64) for name, size in (("x", 3), ("y", 2))}
        for _ in range(NUM_SAMPLES)
    ]


def _model(_stage: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def _config(folder: str, **settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "batch": {"global_size": GLOBAL_SIZE, "microbatch_size": 1},
            "run": {"folder": folder},
            "data": {"shuffle": False},
            "optimizer": {"kind": "sgd", "learning_rate": RATE},
            "logging": {"progress": False},
            "export": False,
            "resilience": {"health": {"enabled": False}},
            **settings,
        }
    )


def _train(folder: str, degree: int) -> tuple[int, dict[str, Tensor]]:
    trained: dict[str, Tensor] = {}
    config = _config(folder, epochs=2, mesh={"data_parallel_shard": degree})
    trainer = Trainer(config, model=_model, data=_data(), task=_Squares(), lr_schedule=lambda step: 1.0)
    trainer.events.on(Finished, lambda event: trained.update(full_parameters(event.model)))
    return trainer.train().steps, trained


@pytest.mark.parametrize("degree", [1, 2])
def test_two_epochs_have_the_steps_of_a_plain_loop(tmp_path: Path, degree: int) -> None:
    model, data = _model(None), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in [*range(0, NUM_SAMPLES, GLOBAL_SIZE)] * 2:
        rows = data[start : start + GLOBAL_SIZE]
        x, y = (torch.stack([row[name] for row in rows]) for name in ("x", "y"))
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / len(rows)).backward()
        optimizer.step()
    for steps, trained in run_ranks(_train, str(tmp_path), degree, world_size=degree):
        assert steps == 6
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        ({}, _data(), "steps is missing, and the training data have no end"),
        ({"steps": 4, "epochs": 1}, _data(), "steps = 4, but the finite training data have samples for 3 steps"),
        ({"epochs": 1}, DatasetProvider(_data()), "epochs = 1, but the data are a DatasetProvider"),
    ],
)
def test_wrong_lengths_are_refused(tmp_path: Path, settings: dict[str, Any], data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(_config(str(tmp_path), **settings), model=_model, data=data, task=_Squares()).train()


def test_a_stream_counts_its_samples() -> None:
    assert IndexedStream(_data(), seed=0, epochs=2).count() == 2 * NUM_SAMPLES


def test_a_provider_of_the_configured_epochs_is_accepted(tmp_path: Path) -> None:
    data = DatasetProvider(_data(), epochs=2)
    trainer = Trainer(_config(str(tmp_path), epochs=2), model=_model, data=data, task=_Squares())
    assert trainer.plan_for(read_launch()).steps == 6
