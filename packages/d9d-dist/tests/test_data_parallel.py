from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from d9d_dist import (
    MeshConfig,
    Precision,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    set_gradient_sync,
)
from d9d_dist.testing import run_ranks

HSDP_AXES = ("dp_replicate", "dp_cp_shard", "cp_replicate")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _inputs() -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Summed loss, in two microbatches, of which only the last one reduces."""
    first, second = inputs.chunk(2)
    set_gradient_sync(model, False)
    model(first).square().sum().backward()
    set_gradient_sync(model, True)
    model(second).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def _on_ranks(kind: str, degrees: dict[str, int]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    with MeshConfig(**degrees).build() as ctx:
        model, dense = _model(), ctx.mesh_for("dense")
        if kind == "replicate":
            parallelize_replicate(model, dense["dp_cp_shard"])
        elif kind == "fsdp":
            parallelize_fsdp(model, dense["dp_cp_shard"])
        else:
            parallelize_hsdp(model, dense[HSDP_AXES], shard_axis="dp_cp_shard")
        placements = [tuple(p.placements) for p in model.parameters() if isinstance(p, DTensor)]
        dp = ctx.mesh_for("batch")["dp"]
        return _gradients(model, _inputs().chunk(dp.size())[dp.get_local_rank()]), placements


@pytest.mark.parametrize(
    ("kind", "degrees", "placements"),
    [
        ("replicate", {"data_parallel_shard": 4}, (Replicate(), Shard(0))),
        ("replicate", {"data_parallel_shard": 2, "tensor_parallel": 2}, (Replicate(), Shard(0))),
        ("fsdp", {"data_parallel_shard": 4}, (Shard(0),)),
        ("hsdp", {"data_parallel_shard": 4}, (Shard(0),)),
        ("hsdp", {"data_parallel_replicate": 2, "data_parallel_shard": 2}, (Replicate(), Shard(0))),
        ("hsdp", {"data_parallel_replicate": 4}, (Replicate(), Shard(0))),
    ],
)
def test_gradients_are_the_sum_over_all_ranks(kind: str, degrees: dict[str, int], placements: tuple[Any, ...]) -> None:
    expected = _gradients(_model(), _inputs())
    for gradients, found in run_ranks(_on_ranks, kind, degrees, world_size=4):
        assert found == [placements] * len(expected)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)


def test_one_rank_leaves_the_module_as_it_is() -> None:
    with MeshConfig().build() as ctx:
        model = _model()
        parallelize_hsdp(model, ctx.mesh_for("dense")[HSDP_AXES], shard_axis="dp_cp_shard")
        parallelize_replicate(model, ctx.mesh_for("flat"))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_precision_holds_on_one_rank_too() -> None:
    with MeshConfig().build() as ctx:
        model = nn.Linear(4, 4)
        parallelize_fsdp(model, ctx.mesh_for("flat"), precision=Precision(compute=torch.bfloat16, reduce=torch.float32))
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16
        assert model.weight.dtype == torch.float32


def test_refuses_an_axis_that_is_not_there() -> None:
    with MeshConfig().build() as ctx, pytest.raises(ValueError, match=r"shard_axis = 'fsdp'; expected one of .* world"):
        parallelize_hsdp(_model(), ctx.mesh_for("flat"), shard_axis="fsdp")


def test_refuses_several_axes_where_one_is_meant() -> None:
    with MeshConfig().build() as ctx:
        for parallelize in (parallelize_fsdp, parallelize_replicate):
            with pytest.raises(ValueError, match=r"got a mesh with the axes \(pp, dp_replicate.*\); expected exactly"):
                parallelize(_model(), ctx.mesh_for("dense"))


def _two_replicate_axes() -> str:
    with MeshConfig(data_parallel_replicate=2, context_parallel_replicate=2).build() as ctx:
        try:
            parallelize_hsdp(_model(), ctx.mesh_for("dense")[HSDP_AXES], shard_axis="dp_cp_shard")
        except ValueError as error:
            return str(error)
        return "no error"


def test_refuses_two_axes_to_replicate_over() -> None:
    for message in run_ranks(_two_replicate_axes, world_size=4):
        assert "to replicate over dp_replicate and cp_replicate; expected at most one axis" in message
