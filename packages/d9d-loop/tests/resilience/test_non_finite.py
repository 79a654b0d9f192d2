from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import DistributedContext, MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_loop.resilience import NonFinite, find_non_finite
from d9d_loop.resilience.non_finite import Watch, _order


class _Spoil(torch.autograd.Function):
    """Identity with a non-finite gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.inf


class _Layer(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "backward":
            x = _Spoil.apply(x)
        y = self.inner(x)
        if self.fault == "forward":
            y = y / torch.zeros_like(y)
        return x + y


def _model(faults: dict[int, str]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(faults.get(index)) for index in range(3)))


def _replay(model: nn.Module, x: torch.Tensor, *, factor: float = 1.0) -> Callable[[Watch], None]:
    def replay(watch: Watch) -> None:
        for _ in range(2):  # microbatches
            loss = model(x).square().sum() * factor
            watch("the loss", loss)
            loss.backward()

    return replay


def _find(ctx: DistributedContext, faults: dict[int, str], *, x: float = 1.0, factor: float = 1.0) -> NonFinite | None:
    model = _model(faults)
    return find_non_finite(model, _replay(model, torch.full((2, 4), x), factor=factor), ctx=ctx)


def test_a_finite_step_gives_no_finding(ctx: DistributedContext) -> None:
    assert _find(ctx, {}) is None


@pytest.mark.parametrize(
    ("faults", "x", "factor", "expected"),
    [
        ({1: "forward", 2: "forward"}, 1.0, 1.0, "the output of '1', in the forward pass of rank 0"),
        ({1: "backward", 0: "backward"}, 1.0, 1.0, "the gradient of an input of '1', in the backward pass of rank 0"),
        ({}, float("nan"), 1.0, "an input, in the forward pass of rank 0"),
        ({}, 1.0, float("inf"), "the loss, in the forward pass of rank 0"),
    ],
)
def test_the_first_non_finite_tensor_is_found(
    faults: dict[int, str], x: float, factor: float, expected: str, ctx: DistributedContext
) -> None:
    found = _find(ctx, faults, x=x, factor=factor)
    assert str(found) == f"the first tensor that is not finite is {expected}"


def test_a_non_finite_parameter_is_found_before_its_consequences(ctx: DistributedContext) -> None:
    model = _model({})
    with torch.no_grad():
        dict(model.named_parameters())["2.inner.weight"][1, 1] = torch.nan
    found = find_non_finite(model, _replay(model, torch.ones(2, 4)), ctx=ctx)
    assert found is not None
    assert (found.module, found.tensor) == ("2.inner", "weight")


def test_no_hooks_remain_after_the_search(ctx: DistributedContext) -> None:
    model = _model({})
    find_non_finite(model, _replay(model, torch.ones(2, 4)), ctx=ctx)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def _find_on_ranks(fault: str, culprits: list[int], shard: bool) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        model = _model({1: fault} if ctx.rank in culprits else {})
        if shard:
            mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
            for layer in model:
                parallelize_hsdp(layer, mesh, shard_axis="dp_cp_shard")
            parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard")
        return str(find_non_finite(model, _replay(model, torch.ones(2, 4)), ctx=ctx))


@pytest.mark.parametrize(
    ("fault", "culprits", "expected"),
    [
        ("backward", [1], "the gradient of an input of '1', in the backward pass of rank 1"),
        ("forward", [0, 2], "the output of '1', in the forward pass of ranks 0, 2"),
    ],
)
@pytest.mark.parametrize("shard", [False, True])
def test_the_rank_of_a_reduced_gradient_is_found(fault: str, culprits: list[int], expected: str, shard: bool) -> None:
    messages = run_ranks(_find_on_ranks, fault, culprits, shard, world_size=3)
    assert messages == [f"the first tensor that is not finite is {expected}"] * 3


def test_the_first_finding_is_chosen_in_the_order_of_execution() -> None:
    def found(phase: Any, stage: int, number: int) -> NonFinite:
        return NonFinite((0,), "", "", phase, stage, number)

    assert min([found("forward", 1, 0), found("forward", 0, 9), found("backward", 0, 1)], key=_order).stage == 0
    assert min([found("backward", 0, 3), found("backward", 1, 50)], key=_order).stage == 1
    assert min([found("backward", 1, 3), found("forward", 1, 50)], key=_order).phase == "forward"
    assert min([found("forward", 1, 3), found("forward", 1, 2)], key=_order).number == 2
