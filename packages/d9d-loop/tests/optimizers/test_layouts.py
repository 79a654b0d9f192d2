"""Every optimizer makes the same updates in every layout, and resumes bitwise from a checkpoint."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    MeshConfig,
    RowParallel,
    materialize,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.testing import full_parameters, run_ranks
from d9d_loop import Events
from d9d_loop.config._config_keys import kinds_of
from d9d_loop.engine.job_state import JobState, Record
from d9d_loop.optimizers.optimizer import (
    AdamConfig,
    AdamWConfig,
    GroupConfig,
    MuonConfig,
    OptimizerConfig,
    OptimizerSettings,
    ScheduleFreeAdamWConfig,
    SGDConfig,
    StochasticAdamWConfig,
)
from d9d_state import CheckpointStore

REST = AdamWConfig(learning_rate=0.1)
KINDS: dict[str, OptimizerSettings] = {
    **{kind: section(learning_rate=0.1) for kind, section in kinds_of(OptimizerConfig).items()},
    "adam": AdamConfig(learning_rate=0.1, weight_decay=0.1),
    "sgd": SGDConfig(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain_sgd": SGDConfig(learning_rate=0.1),
    "muon": MuonConfig(learning_rate=0.1, groups=(GroupConfig(of="vectors", optimizer=REST),)),
    "schedule_free_adamw": ScheduleFreeAdamWConfig(
        learning_rate=0.1, groups=(GroupConfig(pattern="up", weight_decay=0.5),)
    ),
    "stochastic_adamw": StochasticAdamWConfig(learning_rate=0.01, averages="bfloat16"),
    "stochastic_float32": StochasticAdamWConfig(learning_rate=0.01, seed=3),
}
ROUNDED = ("stochastic_adamw", "stochastic_float32")
LAYOUTS = [{"data_parallel_shard": 4}, {"data_parallel_replicate": 2, "data_parallel_shard": 2}]
LAYOUTS.extend([{"tensor_parallel": 2, "data_parallel_shard": 2}, {"data_parallel_shard": 2}])

Result = dict[str, dict[str, Tensor]]


class _Leaves(nn.Module):
    """A norm's weight, a matrix whose rows are not divisible by 4 ranks, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.odd = nn.Parameter(torch.empty(6)), nn.Parameter(torch.empty(5, 6))
        self.stack = nn.Parameter(torch.empty(4, 3, 5))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


class _Model(nn.Module):
    """Not called: tests set the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.leaves = nn.Linear(8, 12), nn.Linear(12, 8), _Leaves()


def _model(ctx: DistributedContext, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Initialize all values as a function of seed, name and index."""
    with torch.device("meta"):
        model = _Model().to(dtype)
    dense = ctx.mesh_for("dense")
    parallelize_tensor(model, dense["tp"], {"up": ColumnParallel(), "down": RowParallel()})
    parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
    materialize(model, device=ctx.device, seed=seed)
    return model


class _Gradients:
    """Build models whose values serve as gradients, each once."""

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._models: dict[tuple[torch.dtype, int], nn.Module] = {}

    @staticmethod
    def dtype_of(kind: str) -> torch.dtype:
        return torch.bfloat16 if kind in ROUNDED else torch.float64

    def __call__(self, kind: str, step: int) -> list[nn.Parameter]:
        key = (self.dtype_of(kind), step)
        if key not in self._models:
            self._models[key] = _model(self._ctx, *key)
        return list(self._models[key].parameters())


class _Training:
    """Run steps with given gradients: those of step s are the initial values of seed s."""

    def __init__(self, ctx: DistributedContext, kind: str, gradients: _Gradients) -> None:
        self.ctx, self.kind, self._gradients = ctx, kind, gradients
        self.model = _model(ctx, gradients.dtype_of(kind))
        self.optimizer = KINDS[kind].build(self.model)

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        for step in range(first, last):
            for parameter, gradient in zip(self.model.parameters(), self._gradients(self.kind, step), strict=True):
                parameter.grad = gradient.detach().clone()
            self.optimizer.step()
        return full_parameters(self.model)

    def state(self, folder: Path) -> JobState:
        store = CheckpointStore(folder / self.kind)
        return JobState(
            store,
            model=self.model,
            optimizer=self.optimizer,
            metrics={},
            config={},
            parts={},
            data_identity=1,
            seed=0,
            ctx=self.ctx,
            events=Events(),
        )


def _train(mesh: dict[str, int]) -> Result:
    with MeshConfig(**mesh).build() as ctx:
        result, gradients = Result(), _Gradients(ctx)
        for kind in KINDS:
            training = _Training(ctx, kind, gradients)
            result[kind] = training.steps(1, 4)
            for parameter in training.model.parameters():
                for value in training.optimizer.state[parameter].values():
                    if isinstance(value, Tensor) and value.ndim:
                        assert isinstance(value, DTensor) == (ctx.world_size > 1)
        return result


def _assert_same(found: Result, expected: Result) -> None:
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            tolerance = 0.0 if kind in ROUNDED else 1e-10
            torch.testing.assert_close(
                found[kind][name],
                tensor,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, at=(kind, name): f"{at} {text}",
            )


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.slow("{'data_parallel_replicate': 2, 'data_parallel_shard': 2}")
@pytest.mark.sample("{'data_parallel_shard': 2}", "{'data_parallel_replicate': 2, 'data_parallel_shard': 2}")
def test_updates_of_every_optimizer_equal_one_process(mesh: dict[str, int]) -> None:
    expected = _train({})
    for found in run_ranks(_train, mesh, world_size=math.prod(mesh.values())):
        _assert_same(found, expected)


def _save_midway(folder: Path, mesh: dict[str, Any]) -> Result:
    with MeshConfig(**mesh).build() as ctx:
        result, gradients = Result(), _Gradients(ctx)
        for kind in KINDS:
            training = _Training(ctx, kind, gradients)
            state = training.state(folder)
            training.steps(1, 3)
            state.save(Record(2))
            result[kind] = training.steps(3, 5)
        return result


def _resume(folder: Path, mesh: dict[str, Any]) -> Result:
    with MeshConfig(**mesh).build() as ctx:
        result, gradients = Result(), _Gradients(ctx)
        for kind in KINDS:
            training = _Training(ctx, kind, gradients)
            assert training.state(folder).restore().step == 2
            result[kind] = training.steps(3, 5)
        return result


@pytest.mark.slow
def test_every_optimizer_resumes_bitwise(tmp_path: Path) -> None:
    expected = _save_midway(tmp_path, {})
    found = _resume(tmp_path, {})
    for kind, tensors in expected.items():
        assert all(torch.equal(found[kind][name], tensor) for name, tensor in tensors.items()), kind
    for resharded in run_ranks(_resume, tmp_path, {"data_parallel_shard": 2}, world_size=2):
        _assert_same(resharded, expected)


@pytest.mark.full
def test_every_sharded_optimizer_resumes_bitwise(tmp_path: Path) -> None:
    mesh = {"data_parallel_shard": 2}
    expected = run_ranks(_save_midway, tmp_path, mesh, world_size=2)[0]
    for found in run_ranks(_resume, tmp_path, mesh, world_size=2):
        for kind, tensors in expected.items():
            assert all(torch.equal(found[kind][name], tensor) for name, tensor in tensors.items()), kind
    _assert_same(_resume(tmp_path, {}), expected)
