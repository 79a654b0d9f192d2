"""A step that the gate skips changes neither parameters nor state, for any gradients."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import MeshConfig, UserError, parallelize_fsdp
from d9d_dist.testing import run_ranks
from d9d_loop.optimizers import JoinedOptimizer, Lion, LocalSGD, Muon, ScheduleFreeAdamW, StochasticAdamW
from d9d_loop.optimizers.gate import counts_steps, gated, run_step, takes_gate, uncount_step


def _lion(model: nn.Module) -> Optimizer:
    return Lion(model.parameters(), lr=0.01, weight_decay=0.1)


def _muon_and_adamw(model: nn.Module) -> Optimizer:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return JoinedOptimizer([Muon(matrices, lr=0.01), torch.optim.AdamW(others, fused=True)])


def _schedule_free(model: nn.Module) -> Optimizer:
    return ScheduleFreeAdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _stochastic_and_lion(model: nn.Module) -> Optimizer:
    (name, weight), *others = model.named_parameters()
    return JoinedOptimizer([StochasticAdamW([(name, weight)], lr=0.01), Lion([each for _, each in others])])


def _sgd(model: nn.Module) -> Optimizer:
    return LocalSGD(model.parameters(), lr=0.01, weight_decay=0.1)


def _sgd_with_momentum(model: nn.Module) -> Optimizer:
    return LocalSGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)


def _values(optimizer: Optimizer) -> list[Tensor]:
    """Return parameters, state and the counts of the groups."""
    counts = [group[key] for group in optimizer.param_groups for key in ("steps", "weight_sum") if key in group]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = [value for each in parameters for value in optimizer.state[each].values()]
    return [*parameters, *map(torch.as_tensor, (*state, *counts))]


def _train(
    build: Callable[[nn.Module], Optimizer], gates: list[float | None], dtype: torch.dtype
) -> list[list[Tensor]]:
    """Run one step for each gate, with NaN gradients where the gate is 1; return copies of all tensors after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4)).to(dtype)
    optimizer = build(model)
    assert takes_gate(optimizer)
    after = []
    for gate in gates:
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan) if gate == 1.0 else torch.randn_like(parameter)
        if gate is None:
            optimizer.step()
        else:
            with gated(optimizer, torch.tensor(gate)):
                optimizer.step()
            if gate == 1.0 and counts_steps(optimizer):
                uncount_step(optimizer)
        after.append([each.detach().clone() for each in _values(optimizer)])
    return after


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


BUILDS = [_lion, _muon_and_adamw, _schedule_free, _stochastic_and_lion, _sgd, _sgd_with_momentum]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDS)
def test_a_gated_step_is_an_ungated_one_or_none(build: Callable[[nn.Module], Optimizer], dtype: torch.dtype) -> None:
    without = _train(build, [None, None, None], dtype)
    assert not any(_equal(before, after) for before, after in pairwise(without))
    first, skipped, second, again, third = _train(build, [0.0, 1.0, 0.0, 1.0, 0.0], dtype)
    for got, expected in zip(
        (first, skipped, second, again, third), [without[i] for i in (0, 0, 1, 1, 2)], strict=True
    ):
        assert _equal(got, expected)


@pytest.mark.parametrize("build", BUILDS)
def test_the_first_step_can_be_skipped(build: Callable[[nn.Module], Optimizer]) -> None:
    _, after = _train(build, [1.0, 0.0], torch.float32)
    (expected,) = _train(build, [None], torch.float32)
    assert _equal(after, expected)


def test_optimizers_without_fused_kernels_take_no_gate() -> None:
    layer = nn.Linear(2, 2)
    foreach = torch.optim.AdamW(layer.parameters(), foreach=True)
    assert not takes_gate(foreach)
    assert not takes_gate(JoinedOptimizer([foreach, Lion(nn.Linear(2, 2).parameters())]))
    assert not counts_steps(foreach)


def _adafactor(num_ranks: int) -> str:
    with MeshConfig(data_parallel_shard=num_ranks).build() as ctx:
        model = nn.Linear(4, 4)
        parallelize_fsdp(model, ctx.mesh_for("flat"))
        model(torch.ones(1, 4)).sum().backward()
        try:
            run_step(torch.optim.Adafactor(model.parameters()))
        except UserError as error:
            return str(error)
        return "updated"


def test_an_optimizer_without_support_for_shards_is_named() -> None:
    expected = r"the optimizer Adafactor cannot update DTensors, which the parameters of several ranks are: .*placement"
    assert all(re.match(expected, message) for message in run_ranks(_adafactor, 2, world_size=2))
    assert _adafactor(1) == "updated"
