"""Parameters shared by the first and last stage, and by every second stage, behave like one tensor."""

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_pipeline import SharedParameters
from d9d_pipeline.schedule import ranks_of_stages
from d9d_pipeline.shared_parameters import shared_names

HOLDERS = {"ends": (0, 3), "often": (0, 1, 3), "frozen": (1, 2)}


def _stage(index: int) -> nn.Module:
    stage = nn.Module()
    stage.own = nn.Parameter(torch.full((2,), float(index)))
    for name, holders in HOLDERS.items():
        if index in holders:
            parameter = nn.Parameter(torch.full((2, 3), 10.0 * index), requires_grad=name != "frozen")
            setattr(stage, name, parameter)
    return stage


def test_shared_names_returns_names_of_several_stages() -> None:
    stages = [dict(_stage(index).named_parameters()) for index in range(4)]
    for stage in stages:
        stage.pop("own")
    assert shared_names(stages) == HOLDERS


def _share(placement: str) -> dict[int, dict[str, tuple[float, float | None]]]:
    """Return the value and gradient of each parameter, for each stage of this rank."""
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        stage_ranks = ranks_of_stages("v" if placement == "v" else "loop", num_ranks=2, stages_per_rank=2)
        stages = {index: _stage(index) for index, rank in enumerate(stage_ranks) if rank == ctx.rank}
        group = ctx.group_for("regular", "pp")
        shared = SharedParameters(HOLDERS, stages, stage_ranks=stage_ranks, group=group)
        for index, stage in stages.items():
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad and (name, index) != ("often", 1):  # a copy without a gradient
                    parameter.grad = torch.full_like(parameter, 1.0 + index)
        shared.add_gradients()
        shared.copy_values()
        return {
            index: {name: (_only(p), None if p.grad is None else _only(p.grad)) for name, p in stage.named_parameters()}
            for index, stage in stages.items()
        }


def _only(tensor: Tensor) -> float:
    (value,) = set(tensor.flatten().tolist())
    return value


def test_gradients_are_summed_on_the_owner_and_values_copied_from_it() -> None:
    expected = {
        0: {"own": (0.0, 1.0), "ends": (0.0, 5.0), "often": (0.0, 5.0)},
        1: {"own": (1.0, 2.0), "often": (0.0, None), "frozen": (10.0, None)},
        2: {"own": (2.0, 3.0), "frozen": (10.0, None)},
        3: {"own": (3.0, 4.0), "ends": (0.0, None), "often": (0.0, None)},
    }
    for placement in ("loop", "v"):  # in V placement the first and the last stage are on one rank
        first, second = run_ranks(_share, placement)
        assert first.keys() == ({0, 2} if placement == "loop" else {0, 3})
        assert {**first, **second} == expected


def _gradient_of_ends(num_ranks: int) -> float | None:
    """Return the gradient of a tied weight, with one stage per rank."""
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        stage = nn.Module()
        if ctx.rank in (0, num_ranks - 1):
            ends = nn.Parameter(torch.zeros(2, 3))
            ends.grad = torch.full_like(ends, 0.1 + ctx.rank)
            stage.ends = ends
        group = ctx.group_for("regular", "pp")
        shared = SharedParameters(
            {"ends": (0, num_ranks - 1)}, {ctx.rank: stage}, stage_ranks=tuple(range(num_ranks)), group=group
        )
        shared.add_gradients()
        gradients = [parameter.grad for parameter in stage.parameters()]
        return _only(gradients[0]) if gradients and gradients[0] is not None else None


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_are_added_once_for_any_number_of_ranks(num_ranks: int) -> None:
    summed = _only(torch.full((1,), 0.1) + torch.full((1,), 0.1 + num_ranks - 1))
    found = run_ranks(_gradient_of_ends, num_ranks, world_size=num_ranks)
    assert found == [summed, *[None] * (num_ranks - 1)]


def test_parameters_shared_by_stages_of_one_rank_need_no_group() -> None:
    stages = {index: _stage(index) for index in range(4)}
    shared = SharedParameters({"ends": (0, 3)}, stages, stage_ranks=(0, 0, 0, 0), group=None)
    stages[3].get_parameter("ends").grad = torch.ones(2, 3)
    shared.add_gradients()
    shared.copy_values()
    gradient = stages[0].get_parameter("ends").grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(2, 3))
    assert stages[3].get_parameter("ends").grad is None
    assert torch.equal(stages[3].get_parameter("ends"), stages[0].get_parameter("ends"))
