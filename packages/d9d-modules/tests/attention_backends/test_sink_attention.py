import torch
from torch import Tensor

from d9d_dist import SplitBackward
from d9d_modules import AttentionOptions, EagerBackend
from d9d_modules.attention_backends.sink_attention import sink_attention


def _inputs() -> list[Tensor]:
    shapes = [(2, 4, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_gradients_by_finite_differences() -> None:
    assert torch.autograd.gradcheck(sink_attention, _inputs())


def test_a_split_backward_defers_the_sinks_gradient() -> None:
    *inputs, sinks = _inputs()
    split = SplitBackward()
    with split.forward():
        out = sink_attention(*inputs, sinks)
    expected = EagerBackend().attend(*inputs, options=AttentionOptions(), documents_BS=None, sinks_H=sinks)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(expected, [*inputs, sinks], grad)
    later = split.backward([out], [grad])
    torch.testing.assert_close([x.grad for x in inputs], list(whole[:3]), rtol=1e-10, atol=1e-12)
    assert sinks.grad is None
    later.compute()
    torch.testing.assert_close(sinks.grad, whole[3], rtol=1e-10, atol=1e-12)


def test_large_scores_and_sinks_do_not_overflow() -> None:
    *inputs, sinks = _inputs()
    out = sink_attention(*(100 * x for x in inputs), 1e4 * sinks)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), [*inputs, sinks]))
