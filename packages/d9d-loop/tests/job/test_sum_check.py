from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import ContextSplit, UserError
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.job.rehearsal import _Rank
from d9d_loop.job.sum_check import check_parts, check_sum

REHEARSES = True  # see quick_jobs.py

Batch = dict[str, Tensor]
LossOf = Callable[[Tensor, Batch], Loss]


class _Own(Task):
    def __init__(self, loss: LossOf) -> None:
        self._loss = loss

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return self._loss(outputs, batch)


def _masked(outputs: Tensor, batch: Batch) -> Tensor:
    return (outputs - batch["y"]).square() * batch["mask"]


def _contrastive(outputs: Tensor, batch: Batch) -> Loss:
    return Loss(F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum"), weight=len(outputs))


MEANS: dict[str, LossOf] = {
    "mean": lambda outputs, batch: Loss(F.mse_loss(outputs, batch["y"]), weight=batch["y"].numel()),
    "mean over rows": lambda outputs, batch: Loss(F.mse_loss(outputs, batch["y"]), weight=len(outputs)),
    "mean over a mask": lambda outputs, batch: Loss(
        _masked(outputs, batch).sum() / batch["mask"].sum(), weight=batch["mask"].sum()
    ),
}
SUMS: dict[str, LossOf] = {
    "sum": lambda outputs, batch: Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel()),
    "Loss.mean": lambda outputs, batch: Loss.mean(F.mse_loss(outputs, batch["y"]), batch["y"].numel()),
    "Loss.sum": lambda outputs, batch: Loss.sum(_masked(outputs, batch), batch["mask"].sum()),
    "mean of microbatches": lambda outputs, batch: Loss(F.mse_loss(outputs, batch["y"]), weight=1),
    "contrastive": _contrastive,
    "zero": lambda outputs, batch: Loss(outputs.sum() * 0, weight=len(outputs)),
}


def _batch(rows: int) -> Batch:
    mask = torch.ones(rows, 3)
    mask[0, 1:] = 0
    return {"x": torch.rand(rows, 4), "y": torch.rand(rows, 3), "mask": mask}


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_mean_with_the_number_of_its_items_is_an_error(rows: int) -> None:
    for name, loss in MEANS.items():
        with pytest.raises(UserError, match=r"_Own.loss returned the total .* for two rows") as error:
            check_sum(_Own(loss), torch.rand(rows, 3), _batch(rows))
        assert "Return Loss.mean(mean, count) or Loss.sum(values, count)." in str(error.value), name
    for loss in SUMS.values():
        check_sum(_Own(loss), torch.rand(rows, 3), _batch(rows))


def test_both_constructors_give_a_sum_and_its_weight() -> None:
    outputs, batch = torch.rand(2, 3), _batch(2)
    for name in ("Loss.mean", "sum"):
        loss = SUMS[name](outputs, batch)
        torch.testing.assert_close(loss.total, (outputs - batch["y"]).square().sum())
        assert loss.weight == 6
    tokens = {"errors": outputs}
    assert Loss.sum(outputs, 6, tokens).tokens is tokens


def test_a_task_without_rows_is_not_checked() -> None:
    check_sum(_Own(lambda outputs, batch: Loss(outputs.mean(), weight=6)), torch.rand(2, 3), {"x": torch.rand(3, 4)})
    check_sum(_Own(lambda outputs, batch: Loss(batch["missing"], 1)), torch.rand(2, 3), _batch(2))


def test_the_rehearsal_finds_a_mean(tmp_path: Path) -> None:
    def trainer(loss: LossOf) -> Trainer:
        config = TrainerConfig.model_validate({"steps": 1, "batch": {"global_size": 4}, "run": {"folder": tmp_path}})
        data: Any = [{key: value[0] for key, value in _batch(1).items()} for _ in range(4)]
        return Trainer(config, model=lambda stage: nn.Linear(4, 3), data=data, task=_Own(loss))

    with pytest.raises(UserError, match=r"_Own.loss returned the total"):
        trainer(MEANS["mean"]).train()
    assert not (tmp_path / "metrics.jsonl").exists()


class _OfParts(_Own):
    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return split.split(batch)


@pytest.mark.parametrize(
    ("loss", "is_wrong"),
    [
        (lambda outputs, batch: Loss.sum(outputs.square(), len(outputs)), True),
        (lambda outputs, batch: Loss.sum(_masked(outputs, batch), torch.tensor(len(batch["x"]))), True),
        (lambda outputs, batch: Loss.sum(outputs.square(), len(outputs) / 2), False),
        (lambda outputs, batch: Loss.sum(outputs.square(), batch["y"].numel()), False),
        (lambda outputs, batch: Loss.sum(_masked(outputs, batch), batch["mask"].sum()), False),
        (lambda outputs, batch: Loss.mean(F.mse_loss(outputs, batch["y"]), len(outputs)), False),
        (lambda outputs, batch: Loss(F.mse_loss(outputs, batch["y"]), weight=1), False),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("has_one_label", [False, True])
def test_weights_of_parts_of_rows_must_add_up(loss: LossOf, is_wrong: bool, num_rows: int, has_one_label: bool) -> None:
    mask = torch.zeros(num_rows, 8, 1)
    mask[:, 3:6] = 1  # the ranks have one and two labels in each row
    if has_one_label:
        mask[:, 5] = 0
    batch = {"x": torch.rand(num_rows, 8, 4), "y": torch.rand(num_rows, 8, 2), "mask": mask}
    splits = [ContextSplit(_Rank(2, rank)) for rank in range(2)]  # ty: ignore[invalid-argument-type]
    with pytest.raises(UserError, match=r"returned the weight 2 for the part of two") if is_wrong else nullcontext():
        check_parts(_OfParts(loss), torch.zeros(num_rows, 4, 2, device="meta"), batch, splits)
