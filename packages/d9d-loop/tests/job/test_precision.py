"""The key `precision`: dtypes of computation, of the parameters and of the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d9d_dist.precision import precision_of_job
from d9d_dist.testing import run_ranks
from d9d_loop import Finished, Loss, Task, Trainer, TrainerConfig


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.seen |= {self.up.weight.dtype, hidden.dtype}
        return self.down(F.relu(hidden))


class _Regression(Task):
    def __init__(self) -> None:
        self.outputs: set[torch.dtype] = set()

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        self.outputs.add(outputs.dtype)
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=len(outputs))


def _dtypes(folder: Path, precision: str, mesh: dict[str, int]) -> tuple[set[torch.dtype], ...]:
    """Return the dtypes in forward, of the outputs and of the trained parameters."""
    config = TrainerConfig.model_validate(
        {
            "steps": 2,
            "batch": {"global_size": 4},
            "run": {"folder": folder},
            "mesh": mesh,
            "precision": precision,
            "logging": {"progress": False},
            "export": False,
        }
    )
    x = torch.randn(8, 3)
    data = [{"x": row, "y": row.sum(0, keepdim=True)} for row in x]
    task, seen, trained = _Regression(), set[torch.dtype](), set[torch.dtype]()

    def take(finished: Finished) -> None:
        assert isinstance(finished.model, _Net)
        seen.update(finished.model.seen)
        trained.update(parameter.dtype for parameter in finished.model.parameters())

    trainer = Trainer(config, model=lambda stage: _Net(), data=data, task=task)
    trainer.events.on(Finished, take)
    trainer.train()
    return seen, task.outputs, trained


@pytest.mark.parametrize("mesh", [{}, {"data_parallel_shard": 2}], ids=["one process", "two ranks"])
def test_bfloat16_computes_between_float32_parameters_and_a_float32_loss(tmp_path: Path, mesh: dict[str, int]) -> None:
    wide = {torch.float32}
    for found in run_ranks(_dtypes, tmp_path, "bfloat16", mesh, world_size=max(1, *mesh.values(), 1)):
        assert found == ({torch.bfloat16}, wide, wide)


def test_auto_keeps_the_dtype_of_the_parameters_on_the_cpu(tmp_path: Path) -> None:
    assert _dtypes(tmp_path, "auto", {}) == ({torch.float32},) * 3


def test_auto_is_bfloat16_on_accelerators() -> None:
    precision = precision_of_job("auto", torch.device("cuda"))
    assert precision == precision_of_job("bfloat16", torch.device("cpu"))
    assert precision is not None
    assert (precision.compute, precision.reduce) == (torch.bfloat16, torch.float32)
    assert precision_of_job("parameters", torch.device("cuda")) is None
