"""Float32 adapters of a bfloat16 model, through the Trainer: equal in every layout, and resumed bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    RowParallel,
    StageInfo,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.testing import full_parameters, run_ranks
from d9d_loop import Finished, Loss, ModelProvider, StepDone, Task, Trainer, TrainerConfig, validate_config
from d9d_peft import LoRA, inject, merge_
from d9d_state import StateMapper, save_model_state

STEPS = 4


@final
@dataclass(frozen=True)
class Adapted(ModelProvider):
    """Frozen bfloat16 model with adapters."""

    def build(self, stage: StageInfo) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
        inject(LoRA("0|2", rank=2), model)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")

    def state_mapper(self, model: nn.Module) -> StateMapper:
        plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        return inject(LoRA("0|2", rank=2), plain)


class Squares(Task):
    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss((outputs.float() - 1).square().sum(), weight=len(outputs))


class Interrupted(Exception):  # noqa: N818 - simulates Ctrl-C
    pass


def interrupt(event: StepDone) -> None:
    if event.step == 3:
        raise Interrupted


def trainer(folder: Path, mesh: dict[str, int]) -> Trainer:
    draws = torch.Generator().manual_seed(0)
    config = {
        "steps": STEPS,
        "batch": {"global_size": 8, "microbatch_size": 2},
        "mesh": mesh,
        "run": {"folder": folder},
        "export": False,  # the weights on disk omit adapters: they are merged first
        "checkpoint": {"every": 2},
        "logging": {"every": 1, "progress": False},
        "resilience": {"health": {"enabled": False}},
        "optimizer": {"learning_rate": 2e-5},
        "lr_schedule": {"warmup_steps": 1},
    }
    return Trainer(
        validate_config(TrainerConfig, config),
        model=Adapted(),
        data=[{"x": torch.randn(6, generator=draws).bfloat16()} for _ in range(32)],
        task=Squares(),
    )


def trained(folder: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the parameters after a job, and after the same job interrupted and resumed."""
    results: dict[str, Any] = {}
    for name in ("straight", "resumed"):
        if name == "resumed":
            first = trainer(folder / name, mesh)
            first.events.on(StepDone, interrupt)
            with pytest.raises(Interrupted):
                first.train()
        job = trainer(folder / name, mesh)
        job.events.on(Finished, lambda done, name=name: results.update({name: finished(done, folder / name)}))
        job.train()
    return results


def finished(done: Finished, folder: Path) -> dict[str, Tensor]:
    parameters = {f"trained {name}": value for name, value in full_parameters(done.model).items()}
    merge_(done.model, done.ctx)
    save_model_state(done.model, folder / "export", Adapted().state_mapper(done.model).inverse(), done.ctx)
    return parameters | {f"merged {name}": value for name, value in full_parameters(done.model).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(trained, tmp_path_factory.mktemp("alone"), {}, world_size=1)[0]


MESHES = {
    "shards": {"data_parallel_shard": 2},
    "replicas": {"data_parallel_replicate": 2},
    "tensor": {"tensor_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.sample("tensor")
def test_float32_adapters_of_a_bfloat16_model_train_equally_in_every_layout_and_resume_bitwise(
    tmp_path: Path, mesh: dict[str, int], alone: dict[str, Any]
) -> None:
    for result in run_ranks(trained, tmp_path, mesh, world_size=2):
        assert result["straight"].keys() == alone["straight"].keys()
        for name, expected in alone["straight"].items():
            got = result["straight"][name]
            assert torch.equal(got, result["resumed"][name]), name
            assert got.dtype == expected.dtype == (torch.float32 if "adapter" in name else torch.bfloat16)
            # Adam moves each element by at most the learning rate per step, for any rounding of the frozen layers.
            error = (got.double() - expected.double()).abs().max()
            assert error <= 2 * STEPS * 2e-5 if "adapter" in name else error <= 2**-8 * expected.abs().max(), name
    exported = load_file(tmp_path / "straight" / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert not any("adapter" in name for name in exported)


def test_one_process_resumes_bitwise_and_updates_every_element(alone: dict[str, Any]) -> None:
    for name, value in alone["straight"].items():
        assert torch.equal(value, alone["resumed"][name]), name
    b = alone["straight"]["trained 0.adapter.lora_b"]
    assert (b != 0).all()
