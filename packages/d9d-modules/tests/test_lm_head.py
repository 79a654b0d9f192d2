import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import LanguageModelHead, language_model_head, lm_head


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_probabilities = (hidden @ weight.T).log_softmax(-1)
    losses = -log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses.masked_fill(labels == -100, 0.0)


def test_without_labels_it_gives_logits() -> None:
    head = LanguageModelHead(6, 11)
    hidden = torch.randn(2, 3, 6)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 100])
def test_chunks_change_neither_losses_nor_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(lm_head, "_LOGITS_PER_CHUNK", chunk * 7)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 6, -100, 3, 2], [-100, -100, -100, 1, 1]])
    gradient = torch.randn(2, 5, dtype=torch.float64)
    expected = _reference(hidden, weight, labels)
    losses = language_model_head(hidden, weight, labels=labels)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        torch.autograd.grad(losses, (hidden, weight), gradient),
        torch.autograd.grad(expected, (hidden, weight), gradient),
    )


@pytest.mark.parametrize(("tokens_per_chunk", "kept_logits"), [(16, True), (4, False), (1, False)])
def test_logits_in_chunks_are_not_kept_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, kept_logits: bool
) -> None:
    monkeypatch.setattr(lm_head, "_LOGITS_PER_CHUNK", tokens_per_chunk * 50)
    hidden = torch.randn(1, 16, 3, requires_grad=True)
    weight = torch.randn(50, 3, requires_grad=True)
    kept: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        language_model_head(hidden, weight, labels=torch.zeros(1, 16, dtype=torch.int64))
    assert (torch.Size((tokens_per_chunk, 50)) in kept) == kept_logits


def test_losses_are_float32_for_half_precision_and_ignored_ones_are_zero() -> None:
    head = LanguageModelHead(8, 5, init_std=1.0).bfloat16()
    hidden = torch.randn(1, 4, 8).bfloat16()
    labels = torch.tensor([[1, -100, 4, -100]])
    losses = head(hidden, labels=labels)
    assert losses.dtype == torch.float32
    assert losses[labels == -100].eq(0).all()
    expected = F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)


def test_an_empty_batch_has_no_losses() -> None:
    head = LanguageModelHead(4, 5)
    assert head(torch.randn(0, 3, 4), labels=torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_reset_parameters_draws_from_the_given_normal_distribution() -> None:
    head = LanguageModelHead(200, 500, init_std=0.3)
    for _ in range(2):
        assert abs(head.weight.std().item() - 0.3) < 0.01
        torch.nn.init.zeros_(head.weight)
        head.reset_parameters()


def test_labels_of_another_shape_are_refused() -> None:
    head = LanguageModelHead(4, 5)
    with pytest.raises(UserError, match=r"labels have shape \(2, 2\); expected \(2, 3\), one label for each position"):
        head(torch.randn(2, 3, 4), labels=torch.zeros(2, 2, dtype=torch.int64))
