import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import d9d_modules._chunked_token_loss
from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_modules import CrossEntropy, LanguageModelHead
from d9d_modules.lm_head import language_model_head

VOCAB, NUM_CANDIDATES = 12, 4


def _values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, generator=draws, requires_grad=True)
    weight = torch.randn(VOCAB, 6, dtype=torch.float64, generator=draws, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 5, NUM_CANDIDATES), generator=draws)
    labels[0, 1, 2] = -100
    return hidden, weight, labels, torch.randn(2, 5, NUM_CANDIDATES, dtype=torch.float64, generator=draws)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_losses_and_gradients_equal_a_computation_from_all_logits(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d9d_modules._chunked_token_loss, "_CHUNK_LOGITS", 3 * VOCAB)
    hidden, weight, labels, upstream = _values()
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)).masked_fill(labels == -100, 0.0)
    found = language_model_head(hidden, weight, labels=labels, softcap=softcap)
    assert_close(found, expected)
    gradients = [torch.autograd.grad(losses, (hidden, weight), upstream) for losses in (found, expected)]
    assert_close(*gradients)


def test_losses_over_a_split_vocabulary_equal_the_concatenated_one() -> None:
    _, _, labels, _ = _values()
    head = LanguageModelHead(6, {"one": 5, "other": 7}).double()
    hidden = torch.randn(2, 5, 6, dtype=torch.float64)
    whole = torch.cat(list(head.parameters()))
    assert_close(head(hidden, labels=labels), language_model_head(hidden, whole, labels=labels))


def _of_a_rank() -> list[torch.Tensor]:
    hidden, weight, labels, upstream = _values()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    own = weight.detach().chunk(2)[mesh.get_local_rank()].clone().requires_grad_()
    loss = CrossEntropy(mesh=mesh)
    found = language_model_head(hidden, own, labels=labels, vocab_size=VOCAB, token_loss=loss)
    return [found.detach(), *torch.autograd.grad(found, (hidden, own), upstream)]


def test_losses_and_gradients_over_a_sharded_vocabulary_equal_one_process() -> None:
    hidden, weight, labels, upstream = _values()
    expected = language_model_head(hidden, weight, labels=labels)
    grad_hidden, grad_weight = torch.autograd.grad(expected, (hidden, weight), upstream)
    first, second = run_ranks(_of_a_rank, world_size=2)
    assert_close(first[0], expected.detach())
    assert_close(second[0], expected.detach())
    assert_close(first[1] + second[1], grad_hidden)  # partial sums
    assert_close(torch.cat((first[2], second[2])), grad_weight)


def test_other_losses_and_shapes_are_refused() -> None:
    hidden, weight, labels, _ = _values()
    with pytest.raises(UserError, match=r"got labels with candidates, \(2, 5, 4\), and token_loss = CrossEntropy"):
        language_model_head(hidden, weight, labels=labels, token_loss=CrossEntropy(z_loss=0.1))
    with pytest.raises(UserError, match=r"labels have shape \(2, 4, 4\); expected \(2, 5\)"):
        language_model_head(hidden, weight, labels=labels[:, 1:])
