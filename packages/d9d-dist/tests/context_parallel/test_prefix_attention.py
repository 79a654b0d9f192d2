import pytest
import torch
from torch import Tensor

from d9d_dist import SplitBackward
from d9d_dist.context_parallel.prefix_attention import prefix_attention
from d9d_dist.errors import UserError


def _inputs(length: int = 4) -> list[Tensor]:
    shapes = [(2, 4, length, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Compute one softmax over the keys and the sink, whose value is zero."""
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("length", [4, 7])
def test_gradients_by_finite_differences(length: int) -> None:
    assert torch.autograd.gradcheck(prefix_attention, _inputs(length))
    assert torch.autograd.gradcheck(prefix_attention, _inputs(length)[:3])


@pytest.mark.parametrize("length", [4, 7])
def test_a_split_backward_defers_the_sinks_gradient(length: int) -> None:
    *inputs, sinks = _inputs(length)
    split = SplitBackward()
    with split.forward():
        out = prefix_attention(*inputs, sinks)
    expected = _reference(*inputs, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(expected, [*inputs, sinks], grad)
    later = split.backward([out], [grad])
    torch.testing.assert_close([x.grad for x in inputs], list(whole[:3]), rtol=1e-10, atol=1e-12)
    assert sinks.grad is None
    later.compute()
    torch.testing.assert_close(sinks.grad, whole[3], rtol=1e-10, atol=1e-12)


def test_large_scores_and_sinks_do_not_overflow() -> None:
    *inputs, sinks = _inputs()
    out = prefix_attention(*(100 * x for x in inputs), 1e4 * sinks)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), [*inputs, sinks]))


def test_a_second_derivative_is_an_error() -> None:
    inputs = _inputs()
    with pytest.raises(UserError, match="through attention with sinks or context parallelism"):
        torch.autograd.grad(prefix_attention(*inputs).sum(), inputs, create_graph=True)
