from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d_dist import DistributedContext, MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_loop import AdamWConfig, Events, Loss, StepOutcome, Task, TrainStep, WarmupCosineConfig
from d9d_metrics import Metric, WeightedMean
from d9d_pipeline import Inputs

Batch = dict[str, torch.Tensor]
GLOBAL_SIZE = 16
STEPS = 4
SCHEDULE = WarmupCosineConfig(warmup_steps=1, final_fraction=0.2).build(STEPS)


class _Masked(Task):
    """Squared error over partly masked elements."""

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(((outputs - batch["y"]).square() * batch["mask"]).sum(), weight=batch["mask"].sum())

    def metrics(self) -> dict[str, Metric]:
        return {"error": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        mean = metrics["error"]
        assert isinstance(mean, WeightedMean)
        mean.update(loss.total, loss.weight)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _batch(step: int) -> Batch:
    """Return a global batch with ragged weights; its second quarter has weight 0."""
    draws = torch.Generator().manual_seed(step)
    mask = (torch.rand(GLOBAL_SIZE, 3, generator=draws) < 0.4).double()
    mask[GLOBAL_SIZE // 4 : GLOBAL_SIZE // 2] = 0
    return {
        "x": torch.randn(GLOBAL_SIZE, 6, generator=draws, dtype=torch.float64),
        "y": torch.randn(GLOBAL_SIZE, 3, generator=draws, dtype=torch.float64),
        "mask": mask,
    }


def _chunk(batch: Batch, index: int, count: int) -> Batch:
    return {name: tensor.chunk(count)[index] for name, tensor in batch.items()}


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    ctx: DistributedContext,
    *,
    max_norm: float | None = None,
    num_microbatches: int = 1,
    lr_schedule: Callable[[int], float] = lambda step: 1.0,
    metrics: Mapping[str, Metric] | None = None,
) -> TrainStep:
    task = _Masked()
    return TrainStep(
        model,
        optimizer,
        task=task,
        metrics=metrics or task.metrics(),
        lr_schedule=lr_schedule,
        max_norm=max_norm,
        num_microbatches=num_microbatches,
        ctx=ctx,
        events=Events(),
    )


Trace = tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]
"""Loss, weight and gradient norm of each step, and the parameters in the end."""


def _by_hand(max_norm: float) -> Trace:
    """Reference without d9d: the whole batch at once, mean loss, clip, update."""
    model = _model()
    optimizer = AdamWConfig(learning_rate=0.05).build(model)
    trace = []
    for step in range(STEPS):
        batch = _batch(step)
        weight = batch["mask"].sum()
        loss = ((model(batch["x"]) - batch["y"]).square() * batch["mask"]).sum() / weight
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * SCHEDULE(step)
        optimizer.step()
        trace.append((loss.item(), weight.item(), norm.item()))
    return trace, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _by_train_step(ctx: DistributedContext, num_microbatches: int, max_norm: float) -> Trace:
    model = _model()
    dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
    parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
    optimizer = AdamWConfig(learning_rate=0.05).build(model)
    take_step = _step(model, optimizer, ctx, max_norm=max_norm, num_microbatches=num_microbatches, lr_schedule=SCHEDULE)
    trace = []
    ranks = ctx.size("batch", "dp")
    for step in range(STEPS):
        mine = _chunk(_batch(step), ctx.coordinate("batch", "dp"), ranks)
        outcome = take_step(step, [_chunk(mine, m, num_microbatches) for m in range(num_microbatches)])
        trace.append((outcome.loss.item(), outcome.weight.item(), outcome.grad_norm.item()))
    parameters = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }
    return trace, parameters


def _on_ranks(degrees: dict[str, int], num_microbatches: int, max_norm: float) -> Trace:
    with MeshConfig(**degrees).build() as ctx:
        return _by_train_step(ctx, num_microbatches, max_norm)


def _assert_same(found: Trace, expected: Trace) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-9, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, parameter in found[1].items():
        torch.testing.assert_close(
            parameter, expected[1][name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 16])
@pytest.mark.parametrize("max_norm", [0.05, float("inf")])
def test_one_process_does_what_one_would_write(ctx: DistributedContext, num_microbatches: int, max_norm: float) -> None:
    expected = _by_hand(max_norm)
    assert any(norm > 0.05 for _, _, norm in expected[0]), "the smaller limit must clip"
    _assert_same(_by_train_step(ctx, num_microbatches, max_norm), expected)


@pytest.mark.parametrize(
    ("degrees", "num_microbatches"),
    [
        ({"data_parallel_shard": 2}, 2),
        ({"data_parallel_shard": 4}, 1),
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, 2),
    ],
)
def test_ranks_do_what_one_process_does(degrees: dict[str, int], num_microbatches: int) -> None:
    expected = _by_hand(0.05)
    world_size = degrees["data_parallel_shard"] * degrees.get("data_parallel_replicate", 1)
    for found in run_ranks(_on_ranks, degrees, num_microbatches, 0.05, world_size=world_size):
        _assert_same(found, expected)


@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel_replicate"])
def test_the_weight_counts_each_token_once(axis: str) -> None:
    """Tensor-parallel ranks see the same tokens, and context-parallel ranks different ones."""
    ranks_of_a_token = 2 if axis == "tensor_parallel" else 1
    expected = _batch(0)["mask"].sum().item() * 2 / ranks_of_a_token
    for loss, weight in run_ranks(_loss_and_weight, {axis: 2}, world_size=2):
        assert weight == expected
        assert loss == pytest.approx(_by_hand(0.05)[0][0][0], rel=1e-9)


def _loss_and_weight(degrees: dict[str, int]) -> tuple[float, float]:
    """Return loss and weight of a step in which every rank has the whole batch as its part."""
    with MeshConfig(**degrees).build() as ctx:
        model = _model()
        outcome = _step(model, _sgd(model), ctx)(0, [_batch(0)])
        return outcome.loss.item(), outcome.weight.item()


def test_a_batch_without_weight_changes_nothing(ctx: DistributedContext) -> None:
    model, before = _model(), _model().state_dict()
    batch = _batch(0)
    batch["mask"].zero_()
    outcome = _step(model, _sgd(model), ctx, max_norm=1.0, num_microbatches=2)(
        0, [_chunk(batch, index, 2) for index in range(2)]
    )
    assert (outcome.loss.item(), outcome.weight.item(), outcome.grad_norm.item()) == (0, 0, 0)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, before[name]), name


def test_the_norm_is_measured_before_clipping(ctx: DistributedContext) -> None:
    free, clipped = (_outcome_and_move(ctx, max_norm) for max_norm in (None, 0.01))
    assert torch.equal(free[0].grad_norm, clipped[0].grad_norm)
    assert free[1].item() == pytest.approx(0.1 * free[0].grad_norm.item())
    assert clipped[1].item() == pytest.approx(0.1 * 0.01, rel=1e-4)


def _outcome_and_move(ctx: DistributedContext, max_norm: float | None) -> tuple[StepOutcome, torch.Tensor]:
    """With plain SGD and learning rate 0.1, parameters change by a tenth of the gradient."""
    model, before = _model(), _model()
    outcome = _step(model, _sgd(model), ctx, max_norm=max_norm)(0, [_batch(0)])
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return outcome, torch.cat([(after - first).flatten() for after, first in pairs]).norm()


def test_every_group_keeps_its_own_peak_rate(ctx: DistributedContext) -> None:
    model = _model()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.4}, {"params": biases, "lr": 0.1}])
    take_step = _step(model, optimizer, ctx, lr_schedule=lambda step: 0.5 ** (step + 1))
    for step, factor in enumerate((0.5, 0.25, 0.125)):
        outcome = take_step(step, [_batch(step)])
        assert outcome.learning_rate == 0.4 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * factor, 0.1 * factor]


def test_gradients_are_gone_after_a_step(ctx: DistributedContext) -> None:
    model = _model()
    _step(model, _sgd(model), ctx)(0, [_batch(0)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_stay(ctx: DistributedContext) -> None:
    model = _model()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    optimizer = AdamWConfig().build(model)
    assert _step(model, optimizer, ctx)(0, [_batch(0)]).grad_norm > 0
    assert torch.equal(frozen, before)


def test_metrics_see_every_microbatch(ctx: DistributedContext) -> None:
    metrics = {"error": WeightedMean()}
    model = _model()
    batch = _batch(0)
    outcome = _step(model, _sgd(model), ctx, num_microbatches=4, metrics=metrics)(
        0, [_chunk(batch, index, 4) for index in range(4)]
    )
    assert metrics["error"].compute().item() == pytest.approx(outcome.loss.item(), rel=1e-12)


def _one_microbatch(model: nn.Module, task: Task, ctx: DistributedContext) -> TrainStep:
    return TrainStep(
        model,
        _sgd(model),
        task=task,
        metrics=task.metrics(),
        lr_schedule=lambda step: 1.0,
        max_norm=None,
        num_microbatches=1,
        ctx=ctx,
        events=Events(),
    )


def test_a_weight_may_be_a_number(ctx: DistributedContext) -> None:
    class Mean(_Masked):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            return Loss((outputs - batch["y"]).square().sum(), weight=outputs.numel())

    model, batch = _model(), _batch(0)
    expected = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    take_step = _one_microbatch(model, Mean(), ctx)
    outcome = take_step(0, [batch])
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert outcome.weight.item() == GLOBAL_SIZE * 3


def test_a_weight_of_nan_is_no_batch_without_weight(ctx: DistributedContext) -> None:
    class Broken(_Masked):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            return Loss(outputs.square().sum(), weight=torch.nan)

    model = _model()
    take_step = _one_microbatch(model, Broken(), ctx)
    outcome = take_step(0, [_batch(0)])
    assert outcome.loss.isnan()
    assert outcome.grad_norm.isnan()


class _Gathers(nn.Module):
    """A buffer that changes in place in forward, one that is reassigned, and one that changes in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("backwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        y = self.norm(x)
        y.register_hook(lambda gradient: self.get_buffer("backwards").add_(1) * 0 + gradient)
        return y


def test_doing_a_step_again_leaves_nothing_behind(ctx: DistributedContext) -> None:
    model = nn.Sequential(_Gathers(), nn.Linear(6, 3).double())
    metrics, seen = {"error": WeightedMean()}, list[str]()
    take_step = _step(model, _sgd(model), ctx, num_microbatches=2, metrics=metrics)
    batches = [_chunk(_batch(0), index, 2) for index in range(2)]
    take_step(0, batches)
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    measured = metrics["error"].compute()
    take_step.replay(batches, lambda name, tensor: seen.append(name))
    assert seen == ["the loss"] * 2
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0], name
        assert torch.equal(tensor, tensors[name][1]), name
    assert tensors["0.calls"][1] == tensors["0.backwards"][1] == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(metrics["error"].compute(), measured)
