from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d_dist import MeshConfig, UserError, VocabParallelHead, materialize, parallelize_tensor, sync_gradients
from d9d_dist.testing import full_gradients, run_ranks
from d9d_modules import LanguageModelHead
from d9d_modules.chunked_cross_entropy import TileSize
from d9d_modules.cross_entropy import CrossEntropy


def _reference(logits: Tensor, labels: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(-1)
    losses = -log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses.masked_fill(labels == -100, 0.0)


class _Largest(TorchDispatchMode):
    """Largest output tensor of any operator."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_a_head_without_labels_returns_logits() -> None:
    head = LanguageModelHead(6, 11)
    hidden = torch.randn(2, 3, 6)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_losses_and_gradients_equal_a_computation_from_all_logits(softcap: float | None) -> None:
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


def test_a_bias_is_added_to_the_logits() -> None:
    head = LanguageModelHead(4, 7, bias=True, init_std=1.0).double()
    bias = head.get_parameter("bias")
    torch.nn.init.normal_(bias)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 6, -100, 3, 2], [-100, -100, -100, 1, 1]])
    logits = F.linear(hidden, head.weight, bias)
    expected, losses = _reference(logits, labels), head(hidden, labels=labels)
    torch.testing.assert_close(head(hidden), logits)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        torch.autograd.grad(losses.sum(), (hidden, head.weight, bias)),
        torch.autograd.grad(expected.sum(), (hidden, head.weight, bias), retain_graph=True),
    )
    scores = head(hidden, labels=labels.clamp(min=0), scores=True)
    torch.testing.assert_close(scores["log_probs"], -_reference(logits, labels.clamp(min=0)))
    torch.testing.assert_close(scores["entropy"], torch.distributions.Categorical(logits=logits).entropy())
    with pytest.raises(UserError, match="bias = True and several vocabulary splits"):
        LanguageModelHead(4, {"orig": 5, "new": 2}, bias=True)


def test_token_loss_replaces_the_cross_entropy() -> None:
    hidden, labels = torch.randn(1, 6, 4, dtype=torch.float64), torch.tensor([[0, 4, -100, 1, 1, 2]])
    smoothed = CrossEntropy(label_smoothing=0.3, z_loss=0.1)
    for loss in (smoothed, lambda logits, labels: 2.0 * smoothed(logits, labels)):
        head = LanguageModelHead(4, 5, init_std=1.0, token_loss=loss).double()
        expected = loss(head(hidden).flatten(0, 1), labels.flatten()).unsqueeze(0)
        torch.testing.assert_close(head(hidden, labels=labels), expected)


@pytest.mark.parametrize("splits", [{"orig": 7}, {"orig": 5, "special": 2}, {"a": 1, "b": 2, "c": 4}])
def test_a_head_with_named_splits_equals_one_weight(splits: dict[str, int]) -> None:
    head = LanguageModelHead(4, splits, init_std=1.0, softcap=3.0).double()
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


def test_invalid_splits_raise() -> None:
    with pytest.raises(UserError, match=r"vocab_sizes is empty; expected at least one split, such as"):
        LanguageModelHead(4, {})
    with pytest.raises(UserError, match=r"vocabulary split 'a.b' with 3 tokens; expected a Python identifier and at"):
        LanguageModelHead(4, {"a.b": 3})
    with pytest.raises(UserError, match=r"vocabulary split 'new' with 0 tokens; expected a Python identifier and at"):
        LanguageModelHead(4, {"orig": 3, "new": 0})


def _on_ranks(loss: CrossEntropy) -> tuple[Tensor, list[Tensor], int, str]:
    """Return losses, gradients and the largest tensor size of a vocabulary-parallel head, and an error message."""
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        head = LanguageModelHead(4, 64, softcap=3.0, token_loss=loss).double()
        parallelize_tensor(head, ctx.mesh_for("dense")["tp"], {"": VocabParallelHead()})
        materialize(head, device=ctx.device, seed=0)
        draws = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 48, 4, dtype=torch.float64, generator=draws).requires_grad_()
        labels = torch.randint(0, 64, (2, 48), generator=draws)
        labels[0, :3] = -100
        with (
            patch("d9d_modules.chunked_cross_entropy.HOST_TILE", TileSize(logits=256, tokens=1024)),
            _Largest() as largest,
        ):
            losses = head(hidden, labels=labels)
            losses.sum().backward()
        sync_gradients(head)
        assert hidden.grad is not None
        with pytest.raises(UserError) as caught:
            head(hidden, labels=labels + 63)
        return losses.detach(), [hidden.grad, *full_gradients(head).values()], largest.numel, str(caught.value)


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(z_loss=0.1, label_smoothing=0.2)])
def test_vocabulary_parallel_ranks_never_hold_all_logits_of_their_shard(loss: CrossEntropy) -> None:
    ((losses, gradients, *_),) = run_ranks(_on_ranks, loss, world_size=1)
    for found_losses, found_gradients, largest, message in run_ranks(_on_ranks, loss, world_size=2):
        torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-11, atol=1e-12)
        assert largest < 2 * 48 * 32  # the logits of a vocabulary shard
        assert "expected labels within 0 ... 63 or -100" in message


@pytest.mark.parametrize("bad", [-1, 5, -101])
def test_labels_out_of_range_raise(bad: int) -> None:
    hidden, labels = torch.randn(1, 3, 4), torch.tensor([[0, bad, -100]])
    message = rf"got labels from {bad} to {bad}; expected labels within 0 ... 4 or -100"
    for head in (
        LanguageModelHead(4, 5),
        LanguageModelHead(4, 5, token_loss=lambda x, _: x.sum(-1)),
        LanguageModelHead(4, {"a": 3, "b": 2}),
    ):
        with pytest.raises(UserError, match=message):
            head(hidden, labels=labels)


def test_an_unsupported_backend_raises() -> None:
    head = LanguageModelHead(4, 5)
    head.loss_backend = "cut_cross_entropy"
    with pytest.raises(UserError, match=r"loss backend 'cut_cross_entropy' is not available: .* Use 'chunked'\."):
        head(torch.randn(1, 3, 4), labels=torch.zeros(1, 3, dtype=torch.int64))
    head.loss_backend = "chunked"
    assert head(torch.randn(1, 3, 4), labels=torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3)


def test_a_softcap_of_zero_is_refused() -> None:
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


def test_labels_of_another_shape_raise() -> None:
    head = LanguageModelHead(4, 5)
    with pytest.raises(UserError, match=r"labels have shape \(2, 2\); expected \(2, 3\), one label for each position"):
        head(torch.randn(2, 3, 4), labels=torch.zeros(2, 2, dtype=torch.int64))


def test_an_unknown_backend_raises() -> None:
    with pytest.raises(UserError, match="loss_backend = 'cce'; expected one of chunked, cut_cross_entropy"):
        LanguageModelHead(4, 8, loss_backend=cast(Any, "cce"))
