"""Jobs that continue from checkpoints of other libraries: their next steps are those of the library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_coming_from import (
    Curve,
    Regression,
    config,
    follow,
    from_a_loop,
    from_transformers,
    net,
    points,
    with_accelerate,
    with_fully_shard,
    with_lightning,
    with_torch,
    with_transformers,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

from d9d_dist.testing import run_ranks
from d9d_loop import ModelReady, OptimizerReady, StepDone, Trainer

pytestmark = pytest.mark.slow


def continued(build: Callable[[Path], Trainer], folder: Path) -> Curve:
    """Return the curve of a job that continues from its newest checkpoint."""
    curve = Curve()
    follow(build(folder), curve)
    return curve


def rest(curve: Curve) -> Curve:
    """Return the steps after the fifth one."""
    return Curve(curve.rates[5:], curve.losses[5:], curve.norms[5:], curve.weights)


def check(build: Callable[[Path], Trainer], folder: Path, source: Path, expected: Curve, **options: Any) -> None:
    """Import a checkpoint in one process, and continue on one rank and on two."""
    for name in ("one", "two"):
        build(folder / name).import_checkpoint(source, **options)
    assert continued(build, folder / "one") == rest(expected)
    for found in run_ranks(continued, build, folder / "two", world_size=2):
        assert found == rest(expected)


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = with_transformers(tmp_path, saves="steps")
    check(from_transformers, tmp_path, tmp_path / "checkpoint-5", expected)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = with_accelerate(saved=tmp_path / "state")
    check(from_a_loop, tmp_path, tmp_path / "state", expected)


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected = with_lightning(tmp_path)
    check(from_a_loop, tmp_path, tmp_path / "step=5.ckpt", expected)


def test_fully_shard_with_a_distributed_checkpoint(tmp_path: Path) -> None:
    expected = run_ranks(with_fully_shard, tmp_path / "dcp", world_size=2)[0]
    check(from_a_loop, tmp_path, tmp_path / "dcp", expected)


def write_distributed(folder: Path) -> None:
    """Train five of ten steps, and write weights and optimizer in the format of torch."""
    trainer, parts = from_a_loop(folder), dict[str, Any]()

    def save(done: StepDone) -> None:
        if done.step == 5:
            weights, state = get_state_dict(parts["model"], parts["optimizer"])
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")

    trainer.events.on(ModelReady, lambda ready: parts.update(model=ready.model))
    trainer.events.on(OptimizerReady, lambda ready: parts.update(optimizer=ready.optimizer))
    trainer.events.on(StepDone, save)
    trainer.train()


def test_torch_continues_a_job_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(write_distributed, tmp_path, world_size=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = get_state_dict(model, optimizer)
    read: Any = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    expected, losses = with_torch(), []
    for batch in torch.utils.data.DataLoader(points()[20:], batch_size=4):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected.losses[5:], rel=1e-6)
    torch.testing.assert_close(dict(model.named_parameters()), expected.weights, rtol=1e-5, atol=1e-6)


# optimizers with groups


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """Build SGD with the biases first, and without weight decay."""
    split: list[list[nn.Parameter]] = [[], []]
    for name, each in model.named_parameters():
        split[name.endswith("weight")].append(each)
    groups: Any = [{"params": split[0], "weight_decay": 0.0}, {"params": split[1]}]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


def from_sgd(folder: Path) -> Trainer:
    optimizer = {"kind": "sgd", "learning_rate": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    schedule = {"kind": "transformers", "name": "linear", "warmup_steps": 2}
    values = config(folder, steps=10, optimizer=optimizer, lr_schedule=schedule, gradients={"max_norm": 1.0})
    return Trainer(values, model=net, data=points(), task=Regression())


def with_sgd(saved: Path) -> Curve:
    import transformers

    model, curve = net(), Curve()
    optimizer = groups_of(model)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 10)
    for step, batch in enumerate(torch.utils.data.DataLoader(points(), batch_size=4), 1):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        curve.losses.append(loss.item())
        curve.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 5:
            dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=saved)
    curve.weights = {name: each.detach() for name, each in model.named_parameters()}
    return curve


def test_groups_of_a_function(tmp_path: Path) -> None:
    expected = with_sgd(tmp_path / "dcp")
    check(from_sgd, tmp_path, tmp_path / "dcp", expected, step=5, optimizer=groups_of)
