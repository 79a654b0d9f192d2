"""Writes to parameters in forward, which sharding would lose, are found by the rehearsal, without a process group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import Launch, StageInfo, UserError
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.job.rehearsal import rehearse


class _Sum(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"x": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.sum(), weight=len(batch))


class _Writing(nn.Module):
    """Calls a function of the module under `no_grad` in each forward."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, max_norm=1.0)
        self.layer, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self._write(self)
        return self.scale * (self.layer(x) + self.slow(x)) + self.rows(torch.zeros(len(x), dtype=torch.int64))


def _rehearse(folder: Path, build: Callable[[StageInfo], nn.Module], num_ranks: int) -> None:
    config = TrainerConfig.model_validate(
        {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": folder}, "trackers": (), "export": False}
    )
    trainer = Trainer(config, model=build, data=[torch.ones(3)] * 4, task=_Sum())
    rehearse(trainer.plan_for(Launch(world_size=num_ranks)))


def _replaced(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data * 2


def _assigned(model: Any) -> None:
    model.layer.bias = nn.Parameter(model.layer.bias * 2)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model: model.slow.weight.mul_(0.9).add_(model.layer.weight, alpha=0.1), r"slow\.weight"),
        (lambda model: model.layer.weight[0].zero_(), r"layer\.weight"),
        (lambda model: model.layer.weight.data.clamp_(-1, 1), r"layer\.weight"),
        (_replaced, r"layer\.weight"),
        (_assigned, r"layer\.bias"),
    ],
    ids=["average", "row", "data", "replaced", "assigned"],
)
def test_writes_to_parameters_are_refused_before_several_ranks_start(
    tmp_path: Path, write: Callable[[Any], Any], name: str
) -> None:
    with pytest.raises(UserError, match=f"forward replaces or writes to {name}, for example"):
        _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=2)
    _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=1)


@pytest.mark.parametrize(
    "write",
    [lambda model: model.seen.add_(1), lambda model: model.scale.mul_(2), lambda model: model.layer.weight * 2],
    ids=["buffer", "replicated", "read"],
)
def test_the_rehearsal_accepts_other_writes(tmp_path: Path, write: Callable[[Any], Any]) -> None:
    _rehearse(tmp_path, lambda stage: _Writing(write), num_ranks=2)


def _require_tie(model: Any) -> None:
    assert model.layer.weight is model.slow.weight


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    def build(stage: StageInfo) -> nn.Module:
        model = _Writing(_require_tie)
        model.slow.weight = model.layer.weight
        return model

    _rehearse(tmp_path, build, num_ranks=1)


class _Labeled(Task):
    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


def _labeled(folder: Path, evaluation: list[dict[str, Tensor]] | None) -> Trainer:
    values = {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": folder}, "trackers": (), "export": False}
    config = TrainerConfig.model_validate({**values, "evaluation": {"every": 4}})
    data = [{"x": torch.ones(3), "y": torch.ones(1)}] * 4
    model = lambda stage: nn.Linear(3, 1)  # noqa: E731
    return Trainer(config, model=model, data=data, evaluation_data=evaluation, task=_Labeled())


def test_the_first_evaluation_batch_is_rehearsed(tmp_path: Path) -> None:
    rehearse(_labeled(tmp_path, [{"x": torch.ones(3), "y": torch.ones(1)}] * 2).plan_for(Launch()))
    message = (
        r"the first evaluation batch fails in _Labeled.loss: KeyError: 'y'\.(.|\n)*The batch is {x: float32\[2, 3\]}"
    )
    with pytest.raises(UserError, match=message):
        rehearse(_labeled(tmp_path, [{"x": torch.ones(3)}] * 2).plan_for(Launch()))


def test_an_interval_of_evaluations_needs_evaluation_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation.every = 4, but there are no evaluation data; expected some"):
        _labeled(tmp_path, None).plan_for(Launch())
