"""Gradients of bfloat16 parameters that accumulate in float32: sums are exact, and the optimizer step works."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, MeshConfig, full_tensor, parallelize_hsdp, parallelize_replicate
from d9d_dist.testing import run_ranks
from d9d_loop import AdamWConfig, Engine, GradientConfig, GradientsReady, Loss, Task
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.optimizers.optimizer import GroupConfig, OptimizerSettings, StochasticAdamWConfig

SMALL = 2.0**-9
ROUNDING = 6 * torch.finfo(torch.float32).eps
"""A gradient is a sum of at most 12 float32 terms, each addition of which rounds by half an eps."""
"""1 + SMALL is 1 in bfloat16."""


class _Sum(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"input": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(outputs.sum(), weight=1.0)


def _gradients(ctx: DistributedContext, kind: str, optimizer: OptimizerSettings) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of two steps: each is the sum of the inputs of all microbatches, calls and ranks."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False)).bfloat16()
    nn.init.ones_(model.get_parameter("0.weight"))
    dense = ctx.mesh_for("dense")
    if kind == "sharded":
        parallelize_hsdp(model, dense["dp_cp_shard",], shard_axis="dp_cp_shard")
    elif kind == "replicated":
        parallelize_replicate(model, dense["dp_replicate",])
    pipeline = Pipeline({0: model}, ctx=ctx)
    pipeline.set_gradients(GradientConfig(dtype="float32"))
    engine = Engine(pipeline, optimizer.build(model), ctx=ctx, task=_Sum())
    seen: list[Tensor] = []

    def keep(ready: GradientsReady) -> None:
        (parameter,) = ready.model.parameters()
        assert parameter.grad is not None
        seen.append(full_tensor(parameter.grad) * (4.0 * 3 * ctx.size("batch", "dp")))

    engine.events.on(GradientsReady, keep)
    values = [1.0, SMALL, SMALL] if ctx.coordinate("batch", "dp") == 0 else [SMALL] * 3
    for _ in range(2):
        for _ in range(4):
            engine.forward_backward([torch.full((1, 4), value).bfloat16() for value in values], _Sum().loss)
        assert engine.step().taken
    (parameter,) = engine.model.parameters()
    return seen, full_tensor(parameter).clone()


def _on_ranks(kind: str, axis: str, optimizer: OptimizerSettings) -> Any:
    with MeshConfig(**{axis: 2}).build() as ctx:
        return _gradients(ctx, kind, optimizer)


@pytest.mark.parametrize(
    ("kind", "axis"), [("sharded", "data_parallel_shard"), ("replicated", "data_parallel_replicate")]
)
def test_sums_over_microbatches_calls_and_ranks_are_exact(kind: str, axis: str) -> None:
    for seen, trained in run_ranks(_on_ranks, kind, axis, AdamWConfig(learning_rate=0.5), world_size=2):
        for gradient in seen:
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, torch.full((2, 4), 4 * (1 + 5 * SMALL)), rtol=ROUNDING, atol=0)
        assert trained.dtype == torch.bfloat16
        assert (trained < 0.5).all()


@pytest.mark.parametrize("optimizer", [AdamWConfig(learning_rate=0.5), StochasticAdamWConfig(learning_rate=0.5)])
def test_gradients_accumulate_in_float32_in_one_process(ctx: DistributedContext, optimizer: OptimizerSettings) -> None:
    seen, trained = _gradients(ctx, "plain", optimizer)
    for gradient in seen:
        torch.testing.assert_close(gradient, torch.full((2, 4), 4 * (1 + 2 * SMALL)), rtol=ROUNDING, atol=0)
    assert (trained < 0.5).all()


def test_an_optimizer_of_a_group_takes_float32_gradients_beside_another_that_does_not(ctx: DistributedContext) -> None:
    model = nn.Linear(4, 2).bfloat16()
    groups = (GroupConfig(of="matrices", optimizer=StochasticAdamWConfig(betas=(0.75, 0.5))),)
    optimizer = AdamWConfig(groups=groups).build(model)
    pipeline = Pipeline({0: model}, ctx=ctx)
    pipeline.set_gradients(GradientConfig(dtype="float32"))
    engine = Engine(pipeline, optimizer, ctx=ctx, task=_Sum())
    engine.forward_backward([torch.full((1, 4), value).bfloat16() for value in (1.0, SMALL)], _Sum().loss)
    assert engine.step().taken
    expected = torch.full((2, 4), 0.25 * (1 + SMALL) / 2)
    torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], expected, rtol=ROUNDING, atol=0)
