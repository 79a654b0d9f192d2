import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import LanguageModelHead
from d9d_modules.cross_entropy import CrossEntropy
from d9d_modules.lm_head import SplitLanguageModelHead


def _reference(logits: Tensor, labels: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(-1)
    losses = -log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses.masked_fill(labels == -100, 0.0)


def test_without_labels_it_gives_logits() -> None:
    head = LanguageModelHead(6, 11)
    hidden = torch.randn(2, 3, 6)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_losses_and_gradients_are_those_of_all_logits(softcap: float | None) -> None:
    head = LanguageModelHead(4, 7, init_std=1.0, softcap=softcap).double()
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 6, -100, 3, 2], [-100, -100, -100, 1, 1]])
    gradient = torch.randn(2, 5, dtype=torch.float64)
    logits = hidden @ head.weight.T
    expected = _reference(logits if softcap is None else softcap * (logits / softcap).tanh(), labels)
    losses = head(hidden, labels=labels)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(_reference(head(hidden), labels), expected)
    torch.testing.assert_close(
        torch.autograd.grad(losses, (hidden, head.weight), gradient),
        torch.autograd.grad(expected, (hidden, head.weight), gradient),
    )


def test_the_loss_can_be_another() -> None:
    hidden, labels = torch.randn(1, 6, 4, dtype=torch.float64), torch.tensor([[0, 4, -100, 1, 1, 2]])
    smoothed = CrossEntropy(label_smoothing=0.3, z_loss=0.1)
    for loss in (smoothed, lambda logits, labels: 2.0 * smoothed(logits, labels)):
        head = LanguageModelHead(4, 5, init_std=1.0, token_loss=loss).double()
        expected = loss(head(hidden).flatten(0, 1), labels.flatten()).unsqueeze(0)
        torch.testing.assert_close(head(hidden, labels=labels), expected)


@pytest.mark.parametrize("splits", [{"orig": 7}, {"orig": 5, "special": 2}, {"a": 1, "b": 2, "c": 4}])
def test_a_split_vocabulary_is_one_vocabulary(splits: dict[str, int]) -> None:
    head = SplitLanguageModelHead(4, splits, init_std=1.0, softcap=3.0).double()
    names = ["weight"] if len(splits) == 1 else [f"weight_{split}" for split in splits]
    assert list(head.state_dict()) == names
    whole = LanguageModelHead(4, 7, softcap=3.0).double()
    with torch.no_grad():
        whole.weight.copy_(torch.cat([head.get_parameter(name) for name in names]))
    hidden, labels = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(0, 7, (2, 5))
    torch.testing.assert_close(head(hidden), whole(hidden))
    torch.testing.assert_close(head(hidden, labels=labels), whole(hidden, labels=labels))
    head.get_parameter(names[0]).requires_grad_(False)
    if len(names) > 1:
        head(hidden, labels=labels).sum().backward()
        whole(hidden, labels=labels).sum().backward()
        assert whole.weight.grad is not None
        start = splits[next(iter(splits))]
        grads = [parameter.grad for name in names[1:] if (parameter := head.get_parameter(name)).grad is not None]
        torch.testing.assert_close(torch.cat(grads), whole.weight.grad[start:])
        assert head.get_parameter(names[0]).grad is None


def test_bad_splits_are_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_sizes is empty; expected one split or more, such as"):
        SplitLanguageModelHead(4, {})
    with pytest.raises(UserError, match=r"vocabulary split 'a.b' of 3 tokens; expected an identifier and 1 token or"):
        SplitLanguageModelHead(4, {"a.b": 3})
    with pytest.raises(UserError, match=r"vocabulary split 'new' of 0 tokens; expected an identifier and 1 token or"):
        SplitLanguageModelHead(4, {"orig": 3, "new": 0})


@pytest.mark.parametrize("bad", [-1, 5, -101])
def test_labels_out_of_range_are_refused(bad: int) -> None:
    hidden, labels = torch.randn(1, 3, 4), torch.tensor([[0, bad, -100]])
    message = rf"got labels from {bad} to {bad}; expected labels within 0 ... 4 or -100"
    for head in (
        LanguageModelHead(4, 5),
        LanguageModelHead(4, 5, token_loss=lambda x, _: x.sum(-1)),
        SplitLanguageModelHead(4, {"a": 3, "b": 2}),
    ):
        with pytest.raises(UserError, match=message):
            head(hidden, labels=labels)


def test_a_backend_that_cannot_serve_is_refused() -> None:
    head = LanguageModelHead(4, 5)
    head.loss_backend = "cut_cross_entropy"
    with pytest.raises(
        UserError, match=r"the loss backend 'cut_cross_entropy' cannot serve: .* Use 'chunked', or None"
    ):
        head(torch.randn(1, 3, 4), labels=torch.zeros(1, 3, dtype=torch.int64))
    head.loss_backend = "chunked"
    assert head(torch.randn(1, 3, 4), labels=torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3)


def test_a_softcap_is_above_zero() -> None:
    with pytest.raises(UserError, match=r"softcap = 0.0; expected a number above 0, or None for no soft-cap"):
        LanguageModelHead(4, 5, softcap=0.0)


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
