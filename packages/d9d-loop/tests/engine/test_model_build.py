import contextlib
import io
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import RankError, full_parameters, run_ranks
from d9d_loop import FunctionProvider, Loss, ModelReady, Task, Trainer, TrainerConfig, validate_config
from d9d_pipeline import Inputs


class _Squares(Task):
    def inputs(self, batch: torch.Tensor) -> Inputs:
        return Inputs(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


class _Author(nn.Module):
    """Initialized as authors do: in `__init__`, in loops, from torch's random numbers and loaded values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.randn(5) * random.random())  # noqa: S311
        self.frozen = nn.Linear(3, 3)
        self.frozen.load_state_dict({"weight": torch.eye(3) * 0.3, "bias": torch.ones(3)})
        self.frozen.requires_grad_(False).eval()
        self.register_buffer("offset", torch.arange(3.0) / 7)
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            module.weight.data.normal_(0, 0.2)
            nn.init.constant_(module.bias, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.frozen(x))) * self.gain) * self.scale + self.offset


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**full_parameters(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def _config(folder: Path, mesh: dict[str, int]) -> TrainerConfig:
    values = {"steps": 1, "batch": {"global_size": 4}, "run": {"folder": folder}, "trackers": (), "export": False}
    quiet = {"logging": {"progress": False}, "resilience": {"health": {"enabled": False}}}
    return validate_config(TrainerConfig, {**values, **quiet, "mesh": mesh, "seed": 11})


def _started(folder: Path, mesh: dict[str, int], build: Callable[[StageInfo], nn.Module]) -> dict[str, Any]:
    """Return the initial values of a job, and its output."""
    found: dict[str, Any] = {}

    def take(ready: ModelReady) -> None:
        found["tensors"] = _tensors(ready.model)
        found["training"] = {name: module.training for name, module in ready.model.named_modules()}
        found["trainable"] = {name: parameter.requires_grad for name, parameter in ready.model.named_parameters()}

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = Trainer(_config(folder, mesh), model=build, data=[torch.ones(3)] * 4, task=_Squares())
        trainer.events.on(ModelReady, take)
        trainer.train()
    return {**found, "printed": [line for line in printed.getvalue().splitlines() if "built other values" in line]}


def _author(stage: StageInfo) -> nn.Module:
    return _Author()


MESHES = [
    {},
    {"data_parallel_replicate": 2},
    {"data_parallel_shard": 2},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2},
]


@pytest.mark.slow(str(MESHES[-1]))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_job_starts_from_the_values_that_the_function_built(tmp_path: Path, mesh: dict[str, int]) -> None:
    torch.manual_seed(11)
    random.seed(11)
    expected = _Author()
    for found in run_ranks(_started, tmp_path, mesh, _author, world_size=2 ** len(mesh)):
        assert found["tensors"].keys() == {**dict(expected.named_parameters()), **dict(expected.named_buffers())}.keys()
        for name, value in _tensors(expected).items():
            assert torch.equal(found["tensors"][name], value), name
        assert found["training"] == {name: module.training for name, module in expected.named_modules()}
        assert found["trainable"] == {name: value.requires_grad for name, value in expected.named_parameters()}
        assert found["printed"] == []


def _clocked(stage: StageInfo) -> nn.Module:
    model = _Author()
    nn.init.constant_(model.down.bias, time.perf_counter_ns() % 1_000_003)
    return model


def _unseeded(stage: StageInfo) -> nn.Module:
    model = _Author()
    torch.seed()
    nn.init.normal_(model.gain)
    return model


@pytest.mark.parametrize(("build", "name"), [(_clocked, "down.bias"), (_unseeded, "gain")])
def test_values_of_rank_0_are_used_if_ranks_build_other_values(
    tmp_path: Path, build: Callable[[StageInfo], nn.Module], name: str
) -> None:
    first, second = run_ranks(_started, tmp_path, {"data_parallel_replicate": 2}, build, world_size=2)
    for key, value in first["tensors"].items():
        assert torch.equal(value, second["tensors"][key]), key
    (line,) = first["printed"]
    assert line.startswith(f"d9d: rank 1 built other values than rank 0 for {name}; the values on rank 0 are used.")
    assert second["printed"] == []


def _of_rank(stage: StageInfo) -> nn.Module:
    return nn.Linear(3, 3 + random.SystemRandom().randrange(10**6))


def test_ranks_that_built_other_structures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the structure of the model differs between the 2 ranks"):
        run_ranks(_started, tmp_path, {"data_parallel_shard": 2}, _of_rank, world_size=2)


class _Staged(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(3, 3) for index in stage.layers(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def test_stages_take_the_values_of_the_whole_model(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = _Staged(StageInfo()).state_dict()
    found: dict[str, torch.Tensor] = {}
    for rank in run_ranks(_started, tmp_path, {"pipeline_parallel": 2}, _Staged, world_size=2):
        found |= rank["tensors"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _drawn(folder: Path, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    provider = FunctionProvider(lambda stage: nn.Linear(3, 3), late_init=True)
    found: dict[str, torch.Tensor] = {}
    trainer = Trainer(_config(folder, mesh), model=provider, data=[torch.ones(3)] * 4, task=_Squares())
    trainer.events.on(ModelReady, lambda ready: found.update(_tensors(ready.model)))
    trainer.train()
    return found


def test_late_init_draws_values_that_no_rank_holds_whole(tmp_path: Path) -> None:
    (one,) = run_ranks(_drawn, tmp_path / "one", {}, world_size=1)
    for found in run_ranks(_drawn, tmp_path / "two", {"data_parallel_shard": 2}, world_size=2):
        assert all(torch.equal(found[name], value) for name, value in one.items())
    torch.manual_seed(11)
    assert not torch.equal(one["weight"], nn.Linear(3, 3).weight)


def test_a_model_without_values_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trainer = Trainer(
        _config(tmp_path, {}), model=lambda stage: nn.LazyLinear(3), data=[torch.ones(3)] * 4, task=_Squares()
    )
    with pytest.raises(UserError, match="built without values for weight, bias"):
        trainer.train()
    assert not dist.is_initialized()
    assert not list(tmp_path.iterdir())
