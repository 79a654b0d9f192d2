from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Engine, EngineConfig, Loss, Task, Trainer, TrainerConfig
from d9d_loop.resilience.bad_steps import BadStepError


class _Squares(Task):
    def inputs(self, batch: Any) -> Any:
        return {"input": batch}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


class _Overflow(torch.optim.SGD):
    """SGD whose third step writes an infinite value, as an update that divides by a number near 0 does."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.num_steps += 1
        if self.num_steps == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(torch.inf)


def _trainer(folder: Path, model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Trainer:
    values = {
        "steps": 3,
        "run": {"folder": folder, "name": "run"},
        "batch": {"global_size": 2},
        "checkpoint": {"every": 1},
        "logging": {"progress": False},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    data = list(torch.ones(6, 4))
    return Trainer(TrainerConfig.model_validate(values), model=model, data=data, task=_Squares(), optimizer=optimizer)


def _train(folder: Path) -> None:
    torch.manual_seed(0)
    trainer = _trainer(folder, nn.Linear(4, 2), lambda model: _Overflow(model.parameters(), lr=0.01))
    with pytest.raises(BadStepError, match=r"after step 3, weight are not finite, or .* is neither saved nor"):
        trainer.train()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_update_to_infinity_in_the_last_step_is_neither_saved_nor_exported(world_size: int, tmp_path: Path) -> None:
    run_ranks(_train, tmp_path, world_size=world_size)
    run = tmp_path / "run"
    assert sorted(each.name for each in (run / "checkpoints").glob("step-*"))[-1] == "step-00000002"
    assert not (run / "export").exists()


@pytest.mark.parametrize("how", ["save", "background", "local"])
def test_an_engine_does_not_save_infinite_parameters(how: str, tmp_path: Path) -> None:
    run = {"folder": tmp_path / "runs", "name": "run"}
    config = EngineConfig.model_validate(
        {"run": run, "tiers": {"local_folder": tmp_path / "local", "local_every": 1, "replicas": 0}}
    )
    opened: Any = Engine.open(
        config, model=lambda stage: nn.Linear(4, 2), task=_Squares(), optimizer=lambda m: _Overflow(m.parameters())
    )
    with opened as engine:
        save = {"save": engine.save, "background": partial(engine.save, background=True), "local": engine.save_local}
        for step in range(3):
            engine.forward_backward([torch.ones(2, 4)], _Squares().loss)
            engine.step()
            if step < 2:
                save[how]()
        with pytest.raises(BadStepError, match=r"after step 3, weight are not finite, or .* is neither saved nor"):
            save[how]()
        engine.load()
        assert engine.num_steps == 2
        assert all(each.isfinite().all() for each in engine.model.parameters())


def test_parameters_trained_in_float16_are_an_error_before_the_start(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, nn.Linear(4, 2).half(), lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(UserError, match=r"weight and 1 other trained parameters are float16; expected float32"):
        trainer.train()
    assert not list(tmp_path.iterdir())
