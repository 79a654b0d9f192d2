"""Trainer jobs over several stages, compared with one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, StageInfo, parallelize_replicate
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, ModelProvider, StepDone, Task, Trainer, TrainerConfig
from d9d_pipeline import Inputs
from d9d_state import save_model_state

SIZE = 4


class _Net(nn.Module):
    def __init__(self, stage: StageInfo, frozen: int) -> None:
        super().__init__()
        layers = {str(index): nn.Linear(SIZE, SIZE) for index in stage.layers(4)}
        self.layers = nn.ModuleDict(layers)
        for index in range(frozen):
            if str(index) in layers:
                layers[str(index)].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


class _Provider(ModelProvider):
    """Some of the first layers are frozen; replicas do not use FSDP."""

    def __init__(self, frozen: int = 0) -> None:
        self.frozen = frozen

    def build(self, stage: StageInfo) -> nn.Module:
        return _Net(stage, self.frozen).double()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])


class _Regression(Task):
    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["x"])

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=batch["y"].numel())


class _Augmented:
    """Randomly generated samples with matching labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.rand(SIZE, dtype=torch.float64) + index
        return {"x": x, "y": x.cos()}


def _train(folder: Path, mesh: dict[str, int], schedule: str, frozen: int, more: dict[str, Any]) -> list[float]:
    config = TrainerConfig.model_validate(
        {
            "steps": 3,
            "batch": {"global_size": 8, "microbatch_size": 2},
            "run": {"folder": folder, "name": f"{schedule}-{'-'.join(map(str, mesh.values()))}"},
            "mesh": mesh,
            "pipeline": {"schedule": schedule, "draw": False},
            "data": {"shuffle": False},
            "trackers": (),
            "logging": {"progress": False},
            "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},  # takes milliseconds
            **more,
        }
    )
    losses: list[float] = []
    trainer = Trainer(config, model=_Provider(frozen), data=_Augmented(), task=_Regression())
    trainer.events.on(StepDone, lambda done: losses.extend([done.loss.item(), done.grad_norm.item()]))
    trainer.train()
    return losses


def _train_each(folder: Path, mesh: dict[str, int], cases: list[tuple[str, int]], more: dict[str, Any]) -> list[Any]:
    return [_train(folder / str(frozen), mesh, schedule, frozen, more) for schedule, frozen in cases]


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, {"data_parallel_replicate": 2}], ids=["two ranks", "replicated"])
@pytest.mark.sample("two ranks")
def test_losses_equal_one_process_with_frozen_stages_and_random_samples(tmp_path: Path, beside: dict[str, int]) -> None:
    cases = [(schedule, frozen) for schedule in ("1f1b", "zbv") for frozen in (0, 2)]
    (expected,) = run_ranks(_train_each, tmp_path / "one", beside, cases, {}, world_size=2 if beside else 1)[:1]
    mesh = {"pipeline_parallel": 2, **beside}
    world_size = 4 if beside else 2
    for found in run_ranks(_train_each, tmp_path / "several", mesh, cases, {}, world_size=world_size):
        for case, losses, wanted in zip(cases, found, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-9), case


def test_initial_weights_need_no_mapper(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_model_state(_Provider().build(StageInfo()), tmp_path / "weights")
    more = {"initial_weights": tmp_path / "weights"}
    (expected,) = run_ranks(_train_each, tmp_path / "one", {}, [("1f1b", 0)], more, world_size=1)
    for found in run_ranks(_train_each, tmp_path / "two", {"pipeline_parallel": 2}, [("zbv", 0)], more):
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
