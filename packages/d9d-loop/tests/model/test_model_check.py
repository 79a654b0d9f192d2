import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from d9d_dist import DistributedContext, StageInfo, parallelize_fsdp
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, ModelProvider, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.model.model_check import describe_modes


class Fit(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"input": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss((outputs - 1).square().sum(), weight=len(outputs))


class FullyShard(ModelProvider):
    """Provider that calls torch's `fully_shard`, beside `parallelize_fsdp` if `is_mixed`."""

    late_init = False

    def __init__(self, *, is_mixed: bool) -> None:
        self.is_mixed = is_mixed

    def build(self, stage: StageInfo) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        if self.is_mixed:
            parallelize_fsdp(model.get_submodule("0"), mesh)
        fully_shard(model, mesh=mesh)


def _norms(folder: str, num_ranks: int) -> list[float]:
    os.chdir(folder)
    norms: list[float] = []
    for is_mixed in (False, True):
        values = {"steps": 1, "batch": {"global_size": 8}, "mesh": {"data_parallel_shard": num_ranks}, "export": False}
        config = TrainerConfig.model_validate({**values, "run": {"name": f"{num_ranks}-{is_mixed}"}})
        trainer = Trainer(config, model=FullyShard(is_mixed=is_mixed), data=list(torch.ones(8, 4)), task=Fit())
        trainer.events.on(StepDone, lambda done: norms.append(float(done.grad_norm)))
        trainer.train()
    return norms


def test_gradients_of_fully_shard_are_summed_over_ranks(tmp_path: Path) -> None:
    model = FullyShard(is_mixed=False).build(StageInfo())
    (model(torch.ones(8, 4)) - 1).square().mean().backward()
    expected = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
    for num_ranks in (1, 2):
        for norms in run_ranks(_norms, str(tmp_path), num_ranks, world_size=num_ranks):
            assert norms == pytest.approx([expected, expected], rel=1e-5)


def test_modules_in_evaluation_mode_are_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    assert describe_modes(model) is None
    text = describe_modes(model.eval())
    assert text is not None
    assert "3 of 3 modules are in evaluation mode (the whole model): they train without dropout" in text
    model.train()[1].eval()
    assert "1 of 3 modules are in evaluation mode (1)" in str(describe_modes(model))
