import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d9d_dist import UserError
from d9d_modules import _chunked_token_loss as module_under_test
from d9d_modules._chunked_token_loss import chunked_token_loss


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Custom loss: squared distance of the label's logit from the mean logit; 0 for label -100."""
    own = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logits.mean(-1) - own).square() * (labels != -100)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 10, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_custom_loss_in_chunks_equals_the_loss_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, softcap: float | None
) -> None:
    monkeypatch.setattr(module_under_test, "_CHUNK_LOGITS", tokens_per_chunk * 7)
    hidden = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    labels, gradient = torch.tensor([0, 6, -100, 3, 2, -100, -100, -100, 1, 1]), torch.randn(10, dtype=torch.float64)
    logits = hidden @ weight.T
    expected = _margin(logits if softcap is None else softcap * (logits / softcap).tanh(), labels)
    wanted = torch.autograd.grad(expected, (hidden, weight), gradient)

    def losses(hidden: Tensor) -> Tensor:
        return chunked_token_loss(hidden, weight, labels, token_loss=_margin, softcap=softcap)

    for found in (losses(hidden), checkpoint(losses, hidden, use_reentrant=False)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight), gradient), wanted)
    weight.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(losses(hidden), hidden, gradient), wanted[:1])


def test_the_gradient_of_a_bfloat16_weight_is_summed_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token per chunk: a bfloat16 sum of ones would saturate at 256."""
    monkeypatch.setattr(module_under_test, "_CHUNK_LOGITS", 1)
    hidden = torch.ones(400, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(400, dtype=torch.int64)
    losses = chunked_token_loss(hidden, weight, labels, token_loss=lambda x, _: x.sum(-1), softcap=None)
    assert losses.dtype == torch.float32
    (gradient,) = torch.autograd.grad(losses.sum(), weight)
    assert gradient.flatten().tolist() == [400.0, 400.0]


def test_losses_that_backward_could_not_repeat_are_errors() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 6, 2])
    with pytest.raises(UserError, match="token_loss drew random numbers; expected a function of the logits and labels"):
        chunked_token_loss(hidden, weight, labels, token_loss=lambda x, _: x.sum(-1) * torch.rand(3), softcap=None)
    scale = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    losses = chunked_token_loss(hidden, weight, labels, token_loss=lambda x, _: x.sum(-1) / scale.exp(), softcap=None)
    with pytest.raises(UserError, match=r"token_loss uses a tensor of shape \(1,\) that requires a gradient"):
        losses.sum().backward()


def test_second_derivatives_are_errors() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 6, 2])
    losses = chunked_token_loss(hidden, weight, labels, token_loss=_margin, softcap=None)
    with pytest.raises(
        UserError, match="create_graph=True through the losses of a language-model head; expected first"
    ):
        torch.autograd.grad(losses.sum(), hidden, create_graph=True)
