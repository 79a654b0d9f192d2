import pytest
import torch
from torch import nn

from d9d_dist import MeshConfig, clip_grad_norm_, scale_gradients_


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
