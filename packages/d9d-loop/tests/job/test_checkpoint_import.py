"""Imports of checkpoints, and their errors. Those of real libraries are in the folder integration_tests."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_loop import Loss, StepDone, Task, Trainer, TrainerConfig, validate_config

Change = Callable[[dict[str, Any]], object]


class _Fit(Task):
    def inputs(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"input": batch}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss.sum(outputs.square(), len(outputs))


def _net(stage: object = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def _trainer(folder: Path, **more: Any) -> Trainer:
    values = {
        "steps": 4,
        "batch": {"global_size": 2},
        "run": {"folder": folder},
        "optimizer": {"learning_rate": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.01, "decays": "all"},
        "lr_schedule": {"kind": "transformers", "name": "constant"},
        "logging": {"progress": False, "report": False},
        "resilience": {"health": {"enabled": False}},
        "data": {"shuffle": False},
    }
    return Trainer(
        validate_config(TrainerConfig, {**values, **more}),
        model=_net,
        data=[torch.full((3,), n / 8) for n in range(8)],
        task=_Fit(),
    )


def _checkpoint(path: Path, change: Change = lambda content: None, *, steps: int = 2) -> list[float]:
    """Train with AdamW of torch, and write a checkpoint in the format of Lightning; return the losses."""
    model, losses = _net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        loss = model(torch.stack([torch.full((3,), n / 8) for n in (2 * step, 2 * step + 1)])).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == steps:
            weights = {f"net.{name}": each.clone() for name, each in model.state_dict().items()}
            content: dict[str, Any] = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
            content = copy.deepcopy({**content, "global_step": steps})
            change(content)
            torch.save(content, path)
    return losses


def test_the_next_steps_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    losses, found = _checkpoint(tmp_path / "last.ckpt"), []
    assert _trainer(tmp_path).import_checkpoint(tmp_path / "last.ckpt").steps == 2
    trainer = _trainer(tmp_path)
    trainer.events.on(StepDone, lambda done: found.append(done.loss.item()))
    trainer.train()
    assert found == pytest.approx(losses[2:], rel=1e-6)
    with pytest.raises(UserError, match=r"and a run with checkpoints; expected an import in one process into a new"):
        _trainer(tmp_path).import_checkpoint(tmp_path / "last.ckpt")


def _set(content: dict[str, Any], **values: object) -> None:
    content["optimizer_states"][0]["param_groups"][0].update(values)


def _without_state(content: dict[str, Any]) -> None:
    del content["optimizer_states"]


def _with_other_groups(content: dict[str, Any]) -> None:
    (group,) = content["optimizer_states"][0]["param_groups"]
    content["optimizer_states"][0]["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]


CHANGES: dict[str, tuple[Change, str]] = {
    "no optimizer": (_without_state, r"has the state of 0 optimizers; expected one"),
    "two optimizers": (lambda c: c["optimizer_states"].append(c["optimizer_states"][0]), r"of 2 optimizers"),
    "groups": (_with_other_groups, r"has groups of \[2, 2\] parameters, but expected \[4\]"),
    "count": (lambda c: _set(c, params=[0, 1, 2]), r"has groups of \[3\] parameters, but expected \[4\]"),
    "rate": (lambda c: _set(c, lr=0.02), r"lr is 0.02 in the checkpoint, and 0.01 in the job: 0.weight"),
    "betas": (lambda c: _set(c, betas=(0.9, 0.95)), r"betas is \(0.9, 0.95\) in the checkpoint, and \(0.9, 0.999\)"),
    "amsgrad": (lambda c: _set(c, amsgrad=True), r"amsgrad is True in the checkpoint, and False in the job"),
    "name": (
        lambda c: _set(c, param_names=["0.weight", "0.bias", "1.weight", "1.scale"]),
        r"only the optimizer of the checkpoint updates 1.scale\n  only the optimizer of the job updates 1.bias",
    ),
    "step": (lambda c: c.update(global_step=4), r"it is of step 4, and the job has 4; expected an earlier step"),
    "other weight": (lambda c: c["state_dict"].update(x=torch.ones(1)), r"has x, which the model lacks"),
    "weight twice": (lambda c: c["state_dict"].update({"0.bias": torch.ones(4)}), r"has 0.bias, twice"),
    "no weight": (lambda c: c["state_dict"].pop("net.0.bias"), r"0.bias is None, expected \[4\]"),
    "shape": (
        lambda c: c["state_dict"].update({"net.0.bias": torch.ones(5)}),
        r"0.bias is \[5\], expected \[4\]",
    ),
    "shape of the state": (
        lambda c: c["optimizer_states"][0]["state"][1].update(exp_avg=torch.ones(5)),
        r"0.bias is \[5\], expected \[4\]",
    ),
    "other state": (
        lambda c: [s.update(exp_inf=s.pop("exp_avg_sq")) for s in c["optimizer_states"][0]["state"].values()],
        r"the checkpoint has the state of its optimizer \(.*\), but the optimizer is now LocalAdamW, which needs",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.sample("rate", "name", "shape of the state", "other state")
def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path, case: str) -> None:
    change, message = CHANGES[case]
    _checkpoint(tmp_path / "last.ckpt", change)
    with pytest.raises(UserError, match=message):
        _trainer(tmp_path).import_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").glob("step*"))


def test_another_optimizer_is_an_error(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "last.ckpt")
    trainer = _trainer(tmp_path, optimizer={"kind": "sgd", "momentum": 0.9, "weight_decay": 0.01})
    with pytest.raises(UserError, match=r"betas is \(0.9, 0.999\) in the checkpoint, and None in the job"):
        trainer.import_checkpoint(tmp_path / "last.ckpt")


def test_a_file_with_other_objects_is_an_error(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": Change}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"has objects that weights_only=True does not read"):
        _trainer(tmp_path).import_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"other.ckpt does not exist"):
        _trainer(tmp_path).import_checkpoint(tmp_path / "other.ckpt")
