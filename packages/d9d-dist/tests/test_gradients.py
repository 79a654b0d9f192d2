import pytest
import torch
from torch import nn

from d9d_dist import MeshConfig, clip_grad_norm_, scale_gradients_


def _model() -> nn.Module:
    """With a gradient for each parameter."""
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


def test_an_infinite_bound_only_measures() -> None:
    model = _model()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with MeshConfig().build() as ctx:
        assert clip_grad_norm_(model.parameters(), float("inf"), ctx=ctx) > 0
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("max_norm", [0.3, float("inf")])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, dtype=torch.float64), torch.tensor(0.0)])
def test_scaling_and_clipping_in_one_pass_is_one_after_the_other(max_norm: float, factor: torch.Tensor | float) -> None:
    ours, theirs = _model(), _model()
    with MeshConfig().build() as ctx:
        norm = clip_grad_norm_(ours.parameters(), max_norm, ctx=ctx, factor=factor)
        scale_gradients_(theirs.parameters(), factor)
        torch.testing.assert_close(norm, clip_grad_norm_(theirs.parameters(), max_norm, ctx=ctx))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_scaling() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    scale_gradients_(model.parameters(), torch.tensor(0.5))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 0.5))
