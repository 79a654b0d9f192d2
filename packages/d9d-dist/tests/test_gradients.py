import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from d9d_dist import (
    MeshConfig,
    clip_grad_norm_,
    global_grad_norm,
    parallelize_hsdp,
    scale_gradients_,
)
from d9d_dist.testing import run_ranks


def _model(stage: int | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 5)]
    return nn.Sequential(*(layers if stage is None else layers[2 * stage : 2 * stage + 2])).double()


def _fill(model: nn.Module, first: int) -> None:
    """Gradients that are a function of the parameter alone, as after a reduction."""
    for number, parameter in enumerate(model.parameters(), start=first):
        generator = torch.Generator().manual_seed(number)
        full = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = full


def _clip(degrees: dict[str, int], norm_type: float) -> tuple[torch.Tensor, torch.Tensor]:
    with MeshConfig(**degrees).build() as ctx:
        pipeline = ctx.size("regular", "pp") > 1
        stage = ctx.coordinate("regular", "pp") if pipeline else None
        model = _model(stage)
        axes = ("dp_replicate", "dp_cp_shard")
        parallelize_hsdp(model, ctx.mesh_for("dense")[axes], shard_axis="dp_cp_shard")
        _fill(model, 4 * (stage or 0))
        parameters = list(model.parameters())
        norm = clip_grad_norm_(parameters, 0.5, ctx=ctx, norm_type=norm_type)
        return norm, global_grad_norm(parameters, ctx=ctx, norm_type=norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard": 4},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "data_parallel_shard": 2},
        {"pipeline_parallel": 2, "data_parallel_replicate": 2},
    ],
    ids=lambda degrees: ",".join(f"{k}={v}" for k, v in degrees.items()),
)
def test_the_norm_counts_each_element_once(degrees: dict[str, int], norm_type: float) -> None:
    model = _model(None)
    _fill(model, 0)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type=norm_type)
    for norm, after in run_ranks(_clip, degrees, norm_type, world_size=4):
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(after, clipped, rtol=1e-13, atol=0)


def test_clipping_equals_torch_on_one_process() -> None:
    ours, theirs = _model(None), _model(None)
    _fill(ours, 0)
    _fill(theirs, 0)
    with MeshConfig().build() as ctx:
        norm = clip_grad_norm_(ours.parameters(), 1.0, ctx=ctx)
    assert norm == nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_an_infinite_bound_only_measures() -> None:
    model = _model(None)
    _fill(model, 0)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with MeshConfig().build() as ctx:
        assert clip_grad_norm_(model.parameters(), float("inf"), ctx=ctx) > 0
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_low_precision_gradients_are_measured_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with MeshConfig().build() as ctx:
        norm = global_grad_norm([parameter], ctx=ctx)
    assert norm.dtype == torch.float32
    assert norm.item() == 64.0


def test_no_gradients_have_norm_zero() -> None:
    with MeshConfig().build() as ctx:
        assert clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0, ctx=ctx).item() == 0.0


def test_scaling() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    scale_gradients_(model.parameters(), torch.tensor(0.5))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 0.5))
