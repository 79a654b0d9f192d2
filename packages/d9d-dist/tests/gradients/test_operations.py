import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import (
    DistributedContext,
    MeshConfig,
    UserError,
    clip_grad_norm_,
    defer_gradient_sync,
    finish_gradient_sync,
    full_tensor,
    parallelize_hsdp,
    scale_gradients_,
    set_grad_dtype,
)
from d9d_dist.data_parallel.gathered_parameters import free_gathered, free_gathered_after_backward
from d9d_dist.gradients.grad_dtype import HAS_GRAD_DTYPE
from d9d_dist.testing import run_ranks


def _model() -> nn.Module:
    """Return a model with a gradient for each parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 5)).double()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_clipping_equals_torch_on_one_process() -> None:
    ours, theirs = _model(), _model()
    with MeshConfig().build() as ctx:
        norm = clip_grad_norm_(ours.parameters(), 1.0, ctx=ctx)
    assert norm == nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_an_infinite_bound_does_not_clip() -> None:
    model = _model()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with MeshConfig().build() as ctx:
        assert clip_grad_norm_(model.parameters(), float("inf"), ctx=ctx) > 0
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("max_norm", [0.3, float("inf")])
@pytest.mark.parametrize("factor", [0.3, torch.tensor(1 / 7, dtype=torch.float64), torch.tensor(0.0)])
def test_scaling_and_clipping_in_one_pass_equals_two_passes(max_norm: float, factor: torch.Tensor | float) -> None:
    ours, theirs = _model(), _model()
    with MeshConfig().build() as ctx:
        norm = clip_grad_norm_(ours.parameters(), max_norm, ctx=ctx, factor=factor)
        scale_gradients_(theirs.parameters(), factor)
        torch.testing.assert_close(norm, clip_grad_norm_(theirs.parameters(), max_norm, ctx=ctx))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("factor", [1 / 3, torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_are_rounded_once(dtype: torch.dtype, factor: torch.Tensor | float) -> None:
    """The factor, e.g. 1 / global weight of a batch, is not rounded to the dtype of 16-bit gradients first."""
    gradient = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = (gradient.to(wide) * torch.as_tensor(factor, dtype=wide)).to(dtype)
    if dtype.itemsize == 2:
        assert not torch.equal(gradient * torch.as_tensor(factor, dtype=dtype), expected), "a rounded factor shows"
    scaled, clipped = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(torch.zeros_like(gradient))
    scaled.grad, clipped.grad = gradient.clone(), gradient.clone()
    scale_gradients_([scaled], factor)
    assert torch.equal(scaled.grad, expected)
    with MeshConfig().build() as ctx:
        clip_grad_norm_([clipped], float("inf"), ctx=ctx, factor=factor)
    assert torch.equal(clipped.grad, expected)


def test_real_and_complex_gradients_are_scaled_together() -> None:
    model = nn.ParameterList([torch.ones(2, dtype=dtype) for dtype in (torch.complex64, torch.float32)])
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 3)
    scale_gradients_(model, torch.tensor(0.5))
    for parameter in model:
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))


def _linear(ctx: DistributedContext) -> nn.Module:
    """Return a sharded layer of ones that stays gathered after forward."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
    parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard", reshard_after_forward=False)
    return model


def _deferred_gradient() -> tuple[bool, list[list[float]]]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = _linear(ctx)
        defer_gradient_sync(model)
        for microbatch in range(2):
            model(torch.full((1, 3), 1.0 + 2 * microbatch + ctx.rank, dtype=torch.float64)).sum().backward()
        is_reduced_early = isinstance(model.get_parameter("weight").grad, DTensor)
        finish_gradient_sync(model)
        gradient = model.get_parameter("weight").grad
        assert gradient is not None
        return is_reduced_early, full_tensor(gradient).tolist()


def test_deferred_gradients_are_reduced_once_at_the_end() -> None:
    assert run_ranks(_deferred_gradient) == [(False, [[1.0 + 2 + 3 + 4] * 3] * 2)] * 2


def _is_freed() -> list[bool]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model, found = _linear(ctx), []
        x = torch.ones(1, 3, dtype=torch.float64)
        for enabled in (False, True):
            free_gathered_after_backward(model, enabled)
            model(x).sum().backward()
            found.append(isinstance(model.weight, DTensor))
        model(x)
        found.append(isinstance(model.weight, DTensor))
        free_gathered(model)
        return [*found, isinstance(model.weight, DTensor)]


def test_gathered_parameters_are_freed_on_request() -> None:
    assert run_ranks(_is_freed) == [[False, True, False, True]] * 2


def test_gradients_accumulate_in_a_dtype_of_their_own() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    if not HAS_GRAD_DTYPE:
        with pytest.raises(UserError, match="gradients with a dtype of their own need torch"):
            set_grad_dtype(model.parameters(), torch.float32)
        return
    set_grad_dtype(model.parameters(), torch.float32)
    for value in (256.0, 1.0):  # their sum is no bfloat16 number
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 257.0
