"""Reports of a job are equal in every layout, also sums, which reveal ranks counted twice or never."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import ColumnParallel, ContextSplit, DistributedContext, RowParallel, StageInfo, parallelize_tensor
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_loop.testing import parse_layout
from d9d_metrics import Max, Metric, Sum, WeightedMean, read_metrics

Batch = dict[str, torch.Tensor]
LENGTH, STEPS = 8, 3
LAYOUTS = ["tp=2,cp_shard=2", "tp=2,dp_shard=2,microbatch=2", "cp_replicate=2,dp_replicate=2"]
VOLATILE = {"time", "items_per_second", "flops_per_second", "peak_memory_gib"}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Split(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return _Net()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        if ctx.size("dense", "tp") > 1:
            parallelize_tensor(model, ctx.mesh_for("dense")["tp"], {"up": ColumnParallel(), "down": RowParallel()})
        super().parallelize(model, ctx)


class _Sequences(Task):
    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        errors = (outputs[..., 0] - batch["x"].sum(-1)).square()
        return Loss((errors * batch["mask"]).sum(), weight=batch["mask"].sum())

    def metrics(self) -> dict[str, Metric]:
        return {"tokens": Sum(), "error": Sum(), "mean": WeightedMean(), "largest": Max()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        tokens, error, mean, largest = metrics.values()
        assert isinstance(tokens, Sum)
        assert isinstance(error, Sum)
        assert isinstance(mean, WeightedMean)
        assert isinstance(largest, Max)
        tokens.update(batch["mask"])
        error.update(loss.total)
        mean.update(loss.total, loss.weight)
        largest.update(outputs)

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return split.split(batch)


def _data(size: int, seed: int) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(LENGTH, 3, generator=draws, dtype=torch.float64),
            "mask": (torch.rand(LENGTH, generator=draws) < 0.6).double(),
        }
        for _ in range(size)
    ]


def _rows(folder: str, layout: str) -> list[dict[str, float]]:
    """Return the reports of a job's main process, with its evaluations."""
    parsed = parse_layout(layout)
    config = {
        "steps": STEPS,
        "batch": {"global_size": 4, "microbatch_size": parsed.microbatch_size},
        "run": {"folder": Path(folder) / (layout or "one")},
        "mesh": parsed.mesh,
        "evaluation": {"every": 2},
        "logging": {"every": 2, "progress": False},
        "optimizer": {"learning_rate": 0.05},
        "export": False,
        "resilience": {"health": {"enabled": False}},
    }
    trainer = Trainer(
        TrainerConfig.model_validate(config),
        model=_Split(),
        data=_data(4 * STEPS, seed=0),
        task=_Sequences(),
        evaluation_data=_data(5, seed=1),
    )
    run_dir = trainer.train().run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in VOLATILE} for row in rows]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    (rows,) = run_ranks(_rows, str(tmp_path_factory.mktemp("one")), "", world_size=1)
    assert sum(row.get("tokens", 0) for row in rows) == sum(sample["mask"].sum() for sample in _data(12, seed=0))
    assert {"grad_norm", "evaluation_error"} <= {name for row in rows for name in row}
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("tp=2,cp_shard=2")
def test_reports_and_evaluations_equal_one_process(
    tmp_path: Path, layout: str, one_process: list[dict[str, float]]
) -> None:
    found = run_ranks(_rows, str(tmp_path), layout, world_size=parse_layout(layout).world_size)[0]
    assert [row.keys() for row in found] == [row.keys() for row in one_process]
    for row, expected in zip(found, one_process, strict=True):
        assert row == pytest.approx(expected, rel=1e-9)
