from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import (
    DistributedContext,
    MeshConfig,
    SequenceParallel,
    clip_grad_norm_,
    materialize,
    parallelize_experts,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks


class Experts(nn.Module):
    """Multiplies each row by its expert's matrix; here for all experts of this rank, in order."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, 3, 4))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x_ENI: Tensor) -> Tensor:
        return x_ENI @ self.weight.transpose(1, 2)


class Sparse(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.experts = Experts(num_experts)

    def forward(self, x_ENI: Tensor) -> Tensor:
        return self.experts(self.dense(x_ENI))


def _inputs(coordinate: int) -> Tensor:
    """Return the rows of all four experts for one rank of `ep_replicate`."""
    draws = torch.Generator().manual_seed(coordinate)
    return torch.randn(4, 2, 4, generator=draws, dtype=torch.float64)


def _expected(num_replicas: int) -> tuple[dict[str, Tensor], Tensor]:
    model = Sparse().double()
    materialize(model.to("meta"), device=torch.device("cpu"), seed=0)
    for coordinate in range(num_replicas):
        model(_inputs(coordinate)).square().sum().backward()
    gradients = full_gradients(model)
    return gradients, torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def _train(
    mesh: dict[str, int], *, shard_replicas: bool, outer: str
) -> tuple[dict[str, Tensor], Tensor, list[tuple[Any, ...]]]:
    """Train on the rows of this rank's experts; a rank's part of the gradient of `dense` comes from those rows."""
    with MeshConfig(**mesh).build() as ctx:
        with torch.device("meta"):
            model = Sparse().double()
        dense, expert = ctx.mesh_for("dense"), ctx.mesh_for("expert")
        parallelize_tensor(model, dense["tp"], {"": SequenceParallel()})
        parallelize_experts(model.experts, expert["ep_replicate", "ep_shard"], shard_replicas=shard_replicas)
        dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        if outer == "hsdp":
            parallelize_hsdp(model, dp, shard_axis="dp_cp_shard")
        else:
            parallelize_replicate(model, dense["dp_cp_shard"])
        materialize(model, device=ctx.device, seed=0)
        per_rank = 4 // ctx.size("expert", "ep_shard")
        start = ctx.coordinate("expert", "ep_shard") * per_rank
        x = _inputs(ctx.coordinate("expert", "ep_replicate"))[start : start + per_rank]
        model(x).square().sum().backward()
        sync_gradients(model)
        norm = clip_grad_norm_(model.parameters(), float("inf"), ctx=ctx)
        weight = model.experts.weight
        assert isinstance(weight, DTensor)
        assert weight.shape == (4, 3, 4)
        places = [tuple(map(repr, weight.placements))]
        return full_gradients(model), norm, places


@pytest.mark.parametrize(
    ("mesh", "shard_replicas", "outer", "placements"),
    [
        ({"data_parallel_shard": 4, "expert_parallel": 2}, True, "hsdp", 2),
        ({"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2}, False, "hsdp", 2),
        ({"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 4}, True, "hsdp", 1),
        ({"data_parallel_shard": 4, "expert_parallel": 2}, False, "replicate", 2),
        ({"tensor_parallel": 2, "expert_parallel": 1}, False, "hsdp", 1),
    ],
)
def test_gradients_and_norm_equal_one_process(
    mesh: dict[str, int], shard_replicas: bool, outer: str, placements: int
) -> None:
    num_ranks = mesh.get("data_parallel_shard", 1) * mesh.get("tensor_parallel", 1)
    gradients, expected_norm = _expected(num_ranks // mesh["expert_parallel"])
    for found, norm, places in run_ranks(_train_with, mesh, shard_replicas, outer, world_size=num_ranks):
        assert_trees_close(found, gradients, rtol=1e-12)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        assert len(places[0]) == placements


def _train_with(mesh: dict[str, int], shard_replicas: bool, outer: str) -> Any:
    return _train(mesh, shard_replicas=shard_replicas, outer=outer)


class TwoProjections(nn.Module):
    """Experts whose projections share no dim that four ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 8, 3))
        self.down = nn.Parameter(torch.empty(2, 3, 8))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up)
        nn.init.normal_(self.down)

    def forward(self, x_ENI: Tensor) -> Tensor:
        return (x_ENI @ self.up.transpose(1, 2)).sin() @ self.down.transpose(1, 2)


def _train_projections() -> tuple[dict[str, Tensor], list[str]]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with torch.device("meta"):
            model = TwoProjections().double()
        parallelize_experts(model, ctx.mesh_for("expert")["ep_replicate", "ep_shard"])
        materialize(model, device=ctx.device, seed=0)
        draws = torch.Generator().manual_seed(ctx.coordinate("expert", "ep_replicate"))
        model(torch.randn(2, 5, 3, generator=draws, dtype=torch.float64)).square().sum().backward()
        sync_gradients(model)
        return full_gradients(model), [
            repr(each.placements) for each in model.parameters() if isinstance(each, DTensor)
        ]


def test_more_ranks_than_experts_shard_each_parameter_in_its_own_dim() -> None:
    model = TwoProjections().double()
    materialize(model.to("meta"), device=torch.device("cpu"), seed=0)
    for rank in range(4):
        draws = torch.Generator().manual_seed(rank)
        model(torch.randn(2, 5, 3, generator=draws, dtype=torch.float64)).square().sum().backward()
    expected = full_gradients(model)
    for found, placements in run_ranks(_train_projections, world_size=4):
        assert_trees_close(found, expected, rtol=1e-12)
        assert placements == ["(Shard(dim=1),)", "(Shard(dim=2),)"]


def _refusals() -> list[str]:
    messages = []

    def refuse(model: nn.Module, mesh: Any) -> None:
        try:
            parallelize_experts(model, mesh)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")

    def drawn(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        experts = Experts(4)
        experts.reset_parameters()
        return experts

    def built(num_experts: int = 4) -> Sparse:
        with torch.device("meta"):
            return Sparse(num_experts)

    with MeshConfig(data_parallel_shard=-1, expert_parallel=2).build() as ctx:
        expert = ctx.mesh_for("expert")["ep_replicate", "ep_shard"]
        refuse(built().experts, ctx.mesh_for("dense")["dp_cp_shard", "tp"])
        refuse(built(5).experts, expert)
        sharded = built()
        parallelize_hsdp(sharded, _dp(ctx), shard_axis="dp_cp_shard")
        refuse(sharded.experts, expert)
        twice = built()
        parallelize_experts(twice.experts, expert)
        refuse(twice.experts, expert)
        refuse(drawn(ctx.rank), expert)
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        refuse(drawn(ctx.rank), ctx.mesh_for("expert")["ep_replicate", "ep_shard"])
    return messages


def _dp(ctx: DistributedContext) -> Any:
    return ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]


def test_unsupported_models_are_refused() -> None:
    for axes, uneven, sharded, twice, *drawn in run_ranks(_refusals, world_size=2):
        assert "got a mesh with the axes (dp_cp_shard, tp); expected (ep_replicate, ep_shard)" in axes
        assert "mesh.expert_parallel = 2 does not divide the 5 experts of weight. Use a degree" in uneven
        assert "weight is already parallelized over (dp_cp_shard); expected unsharded experts" in sharded
        assert "weight is already parallelized over (ep_shard)" in twice
        assert len(drawn) == 2
        for message in drawn:
            assert message.startswith("the values of weight differ between the 2 ranks that would share them; ")
