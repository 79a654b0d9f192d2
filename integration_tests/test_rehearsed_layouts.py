"""Jobs on several ranks are rehearsed: with experts, tensor parallelism and compiled modules, and with a mistake."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import moe_job
import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.job import training

REHEARSES = True  # see quick_jobs.py


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)
        self.up.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _Squares(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"x": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


class _Typo(_Squares):
    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.squares().sum(), weight=len(batch))  # ty: ignore[missing-attribute] - the mistake


def _train_mlp(folder: Path, task: Task) -> None:
    config = {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": folder, "name": "run"}, "export": False}
    logging = {"progress": False, "every": 1}
    Trainer(
        TrainerConfig.model_validate({**config, "logging": logging}),
        model=lambda stage: _Mlp(),
        data=[torch.ones(3)] * 4,
        task=task,
    ).train()


def _train(layout: str, folder: Path) -> str:
    """Run a step in a layout of the MoE decoder, or of the compiled module; return what the job prints."""
    with redirect_stdout(StringIO()) as output:
        if layout:
            moe_job.train(layout, str(folder / "run"), 1, 0.01)
        else:
            _train_mlp(folder, _Squares())
    return output.getvalue()


@pytest.mark.slow("tensor")
@pytest.mark.parametrize("layout", ["ep=2,dp_shard=2", "tp=2", ""], ids=["experts", "tensor", "compiled"])
def test_a_job_on_two_ranks_is_rehearsed_and_its_flops_are_known(layout: str, tmp_path: Path) -> None:
    printed = run_ranks(_train, layout, tmp_path, world_size=2)
    assert not [text for text in printed if "rehearsal" in text or "FLOPs" in text]
    assert "flops_per_second" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def _mistake(folder: Path) -> str:
    with pytest.raises(UserError) as failure:
        _train_mlp(folder, _Typo())
    return str(failure.value)


def test_each_rank_raises_the_mistake_that_the_rehearsal_of_rank_0_finds(tmp_path: Path) -> None:
    messages = run_ranks(_mistake, tmp_path, world_size=2)
    for message in messages:
        assert "the first batch fails in _Typo.loss: AttributeError" in message, messages
    assert not (tmp_path / "run").exists()


def _rehearsal() -> str:
    return training.rehearse.__qualname__


def test_ranks_rehearse_in_the_same_modules_as_this_process() -> None:
    assert run_ranks(_rehearsal, world_size=1) == [_rehearsal()]
