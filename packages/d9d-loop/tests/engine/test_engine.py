from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d_dist import DistributedContext, MeshConfig, UserError, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_loop import AdamWConfig, BadStepFound, Engine, Loss, Task
from d9d_loop.engine.train_step import StepResult
from d9d_loop.lr.lr_schedule import WarmupCosineConfig
from d9d_loop.task import LossFunction
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


LOSS = _Masked().loss


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


def _engine(
    model: nn.Module,
    optimizer: Optimizer,
    ctx: DistributedContext,
    *,
    max_norm: float | None = None,
    num_microbatches: int = 1,
    task: Task | None = None,
) -> Engine:
    return Engine(
        model, optimizer, ctx=ctx, task=task or _Masked(), max_norm=max_norm, num_microbatches=num_microbatches
    )


def _take_step(engine: Engine, batches: list[Batch], loss: LossFunction = LOSS) -> StepResult:
    engine.accumulate(batches, loss)
    return engine.step()


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


def _by_engine(ctx: DistributedContext, num_microbatches: int, max_norm: float) -> Trace:
    model = _model()
    dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
    parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
    optimizer = AdamWConfig(learning_rate=0.05).build(model)
    engine = _engine(model, optimizer, ctx, max_norm=max_norm, num_microbatches=num_microbatches)
    trace = []
    ranks = ctx.size("batch", "dp")
    for step in range(STEPS):
        mine = _chunk(_batch(step), ctx.coordinate("batch", "dp"), ranks)
        engine.set_learning_rates(SCHEDULE(step))
        result = _take_step(engine, [_chunk(mine, m, num_microbatches) for m in range(num_microbatches)])
        trace.append((result.loss.item(), result.weight.item(), result.grad_norm.item()))
    parameters = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }
    return trace, parameters


def _on_ranks(degrees: dict[str, int], num_microbatches: int, max_norm: float) -> Trace:
    with MeshConfig(**degrees).build() as ctx:
        return _by_engine(ctx, num_microbatches, max_norm)


def _assert_same(found: Trace, expected: Trace) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-9, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, parameter in found[1].items():
        torch.testing.assert_close(
            parameter, expected[1][name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 16])
@pytest.mark.parametrize("max_norm", [0.05, float("inf")])
def test_one_process_equals_a_hand_written_loop(
    ctx: DistributedContext, num_microbatches: int, max_norm: float
) -> None:
    expected = _by_hand(max_norm)
    assert any(norm > 0.05 for _, _, norm in expected[0]), "the smaller limit must clip"
    _assert_same(_by_engine(ctx, num_microbatches, max_norm), expected)


@pytest.mark.parametrize(
    ("degrees", "num_microbatches"),
    [
        ({"data_parallel_shard": 2}, 2),
        ({"data_parallel_shard": 4}, 1),
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, 2),
    ],
)
def test_ranks_equal_one_process(degrees: dict[str, int], num_microbatches: int) -> None:
    expected = _by_hand(0.05)
    world_size = degrees["data_parallel_shard"] * degrees.get("data_parallel_replicate", 1)
    for found in run_ranks(_on_ranks, degrees, num_microbatches, 0.05, world_size=world_size):
        _assert_same(found, expected)


@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel_replicate"])
def test_the_loss_weight_counts_each_token_once(axis: str) -> None:
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
        result = _take_step(_engine(model, _sgd(model), ctx), [_batch(0)])
        return result.loss.item(), result.weight.item()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_of_weight_zero_changes_nothing(ctx: DistributedContext, foreach: bool) -> None:
    """Momentum and weight decay would change the parameters, and the step its counts."""
    results = []
    for steps in ([0, None, 1], [0, 1]):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, foreach=foreach, fused=not foreach)
        engine = _engine(model, optimizer, ctx, max_norm=1.0)
        found = list[str]()
        engine.events.on(BadStepFound, lambda bad, found=found: found.append(bad.why))
        for step in steps:
            batch = _batch(step or 0)
            batch["mask"] *= step is not None
            result = _take_step(engine, [batch])
            assert bool(result.taken) is (step is not None)
            if step is None:
                assert (result.loss.item(), result.weight.item(), result.grad_norm.item()) == (0, 0, 0)
        assert found == [
            f"step {number}: the loss weight is 0, for example because all labels are masked; its update was skipped."
            for number, step in enumerate(steps, 1)
            if step is None
        ]
        results.append([*model.parameters(), *(value for each in optimizer.state.values() for value in each.values())])
    for skipped, never in zip(*results, strict=True):
        assert torch.equal(skipped, never)


def test_the_norm_is_measured_before_clipping(ctx: DistributedContext) -> None:
    free, clipped = (_result_and_move(ctx, max_norm) for max_norm in (None, 0.01))
    assert torch.equal(free[0].grad_norm, clipped[0].grad_norm)
    assert free[1].item() == pytest.approx(0.1 * free[0].grad_norm.item())
    # Clipping adds 1e-6 to the norm, as torch does.
    norm = free[0].grad_norm.item()
    assert clipped[1].item() == pytest.approx(0.1 * 0.01 * norm / (norm + 1e-6))


def _result_and_move(ctx: DistributedContext, max_norm: float | None) -> tuple[StepResult, torch.Tensor]:
    """With plain SGD and learning rate 0.1, parameters change by a tenth of the gradient."""
    model, before = _model(), _model()
    result = _take_step(_engine(model, _sgd(model), ctx, max_norm=max_norm), [_batch(0)])
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return result, torch.cat([(after - first).flatten() for after, first in pairs]).norm()


def test_every_group_keeps_its_own_peak_rate(ctx: DistributedContext) -> None:
    model = _model()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.4}, {"params": biases, "lr": 0.1}])
    engine = _engine(model, optimizer, ctx)
    for step, factor in enumerate((0.5, 0.25, 0.125)):
        engine.set_learning_rates(factor)
        result = _take_step(engine, [_batch(step)])
        assert result.learning_rate == 0.4 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * factor, 0.1 * factor]


def test_gradients_are_none_after_a_step(ctx: DistributedContext) -> None:
    model = _model()
    _take_step(_engine(model, _sgd(model), ctx), [_batch(0)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_do_not_change(ctx: DistributedContext) -> None:
    model = _model()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    optimizer = AdamWConfig().build(model)
    assert _take_step(_engine(model, optimizer, ctx), [_batch(0)]).grad_norm > 0
    assert torch.equal(frozen, before)


def test_a_weight_may_be_a_number(ctx: DistributedContext) -> None:
    class Mean(_Masked):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            return Loss((outputs - batch["y"]).square().sum(), weight=outputs.numel())

    model, batch = _model(), _batch(0)
    expected = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    result = _take_step(_engine(model, _sgd(model), ctx), [batch], Mean().loss)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert result.weight.item() == GLOBAL_SIZE * 3


def test_a_weight_of_nan_is_not_treated_as_zero(ctx: DistributedContext) -> None:
    class Broken(_Masked):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
            return Loss(outputs.square().sum(), weight=torch.nan)

    model = _model()
    result = _take_step(_engine(model, _sgd(model), ctx), [_batch(0)], Broken().loss)
    assert result.loss.isnan()
    assert result.grad_norm.isnan()


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


def test_replaying_a_step_changes_neither_parameters_nor_buffers(ctx: DistributedContext) -> None:
    model = nn.Sequential(_Gathers(), nn.Linear(6, 3).double())
    seen = list[str]()
    engine = _engine(model, _sgd(model), ctx, num_microbatches=2)
    batches = [_chunk(_batch(0), index, 2) for index in range(2)]
    _take_step(engine, batches)
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    engine.replay(batches, LOSS, lambda name, tensor: seen.append(name))
    assert seen == ["the loss"] * 2
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0], name
        assert torch.equal(tensor, tensors[name][1]), name
    assert tensors["0.calls"][1] == tensors["0.backwards"][1] == 2
    assert all(parameter.grad is None for parameter in model.parameters())


def _uneven(ctx: DistributedContext, counts: list[list[int]]) -> Trace:
    """Train with another number of microbatches on each rank, in several calls a step."""
    model = _model()
    dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
    parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
    engine = _engine(model, AdamWConfig(learning_rate=0.05).build(model), ctx, max_norm=0.05)
    rank, trace = ctx.coordinate("batch", "dp"), []
    for step in range(STEPS):
        engine.set_learning_rates(SCHEDULE(step))
        rows = {name: iter(tensor.split(1)) for name, tensor in _batch(step).items()}
        for call in counts:
            parts = [[{name: next(rows[name]) for name in rows} for _ in range(number)] for number in call]
            tokens = engine.forward_backward(parts[rank], _loss_with_errors)
            assert [each["error"].shape for each in tokens] == [(1, 3)] * call[rank]
        result = engine.step()
        trace.append((result.loss.item(), result.weight.item(), result.grad_norm.item()))
    return trace, {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }


def _loss_with_errors(outputs: torch.Tensor, batch: Batch) -> Loss:
    loss = LOSS(outputs, batch)
    return Loss(loss.total, loss.weight, tokens={"error": outputs - batch["y"]})


def _on_uneven_ranks(degrees: dict[str, int], counts: list[list[int]]) -> Trace:
    with MeshConfig(**degrees).build() as ctx:
        return _uneven(ctx, counts)


@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"data_parallel_replicate": 2}])
def test_ranks_may_have_different_numbers_of_microbatches(degrees: dict[str, int]) -> None:
    counts = [[3, 1], [0, 5], [4, 2], [1, 0]]  # 16 rows
    for found in run_ranks(_on_uneven_ranks, degrees, counts, world_size=2):
        _assert_same(found, _by_hand(0.05))


def test_a_rank_without_batches_runs_batches_of_another_rank(ctx: DistributedContext) -> None:
    for found in run_ranks(_on_uneven_ranks, {"data_parallel_shard": 2}, [[0, 16]], world_size=2):
        _assert_same(found, _by_hand(0.05))


def test_steps_without_gradients_or_batches_are_refused(ctx: DistributedContext) -> None:
    model = _model()
    engine = _engine(model, _sgd(model), ctx)
    with pytest.raises(UserError, match=r"got step\(\) without gradients; expected forward_backward\(\) before"):
        engine.step()
    with pytest.raises(UserError, match="no rank passed a batch; expected at least one"):
        engine.forward_backward([], LOSS)


def test_stand_ins_on_one_data_parallel_rank_change_no_buffer(ctx: DistributedContext) -> None:
    found = []
    for batches in ([_batch(0)], [_batch(0), _batch(1), _batch(1)]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        engine = _engine(model, _sgd(model), ctx)
        engine.accumulate(batches, LOSS, num_own=1)
        found.append((engine.step().grad_norm, dict(model.named_buffers())))
    assert found[0][1]["0.num_batches_tracked"] == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


def _norm_on_uneven_ranks(kind: str) -> str:
    norms = {"batch": nn.BatchNorm1d(6), "instance": nn.InstanceNorm1d(6, track_running_stats=True)}
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = nn.Sequential(norms[kind], nn.Linear(6, 3)).double()
        engine = _engine(model, _sgd(model), ctx)
        try:
            engine.forward_backward([_batch(0)] * (1 + ctx.rank), LOSS)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_stand_ins_with_synchronized_norms_are_an_error_on_all_ranks(kind: str) -> None:
    for message in run_ranks(_norm_on_uneven_ranks, kind, world_size=2):
        assert message.startswith("rank 0 got fewer than 2 batches, and the model has batch norms in training mode")


def _router_loss_on_uneven_ranks(scope: Any, takes_mask: bool) -> str:
    moe: Any = pytest.importorskip("d9d_moe")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            losses = moe.RouterLosses(balance=0.5, scope=scope)
            self.moe = moe.MoELayer(6, 4, router=moe.TopKRouter(6, num_experts=4, top_k=2), losses=losses)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x.unflatten(0, (2, -1))).hidden.flatten(0, 1)[:, :3]

    class Masked(Net):
        def forward(self, x: torch.Tensor, mask_BL: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        model = (Masked if takes_mask else Net)().double()
        try:
            _engine(model, _sgd(model), ctx).forward_backward([_batch(0)] * (1 + ctx.rank), LOSS)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("scope", "takes_mask", "expected"),
    [
        (
            "batch",
            False,
            'rank 0 got fewer than 2 batches, and the model has router losses of scope "batch" and a forw',
        ),
        ("sequence", False, ""),
        ("batch", True, ""),
    ],
)
def test_stand_ins_that_would_count_in_the_load_of_experts_are_an_error_on_all_ranks(
    scope: str, takes_mask: bool, expected: str
) -> None:
    pytest.importorskip("d9d_moe")
    for message in run_ranks(_router_loss_on_uneven_ranks, scope, takes_mask, world_size=2):
        assert message[: len(expected) or None] == expected


def _different_batches() -> str:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        model = _model()
        try:
            _engine(model, _sgd(model), ctx).forward_backward([_batch(0)] * (1 + ctx.rank), LOSS)
        except UserError as error:
            return str(error)
        return ""


def test_ranks_of_one_data_parallel_coordinate_need_the_same_batches() -> None:
    for message in run_ranks(_different_batches, world_size=2):
        assert "rank 1 got 2 batches, and an earlier rank with data-parallel coordinate 0 got 1; expected" in message
