from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d_dist import MeshConfig, UserError, VocabParallelHead, full_tensor, parallelize_tensor
from d9d_dist.testing import run_ranks
from d9d_modules import CrossEntropy, LanguageModelHead, chunked_cross_entropy, token_scores

SIZE = 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink tiles: several token tiles and vocabulary blocks, the last ones smaller."""
    monkeypatch.setattr(chunked_cross_entropy, "HOST_TILE", chunked_cross_entropy.TileSize(logits=40, tokens=4))


def _draw(num_tokens: int, splits: Sequence[int], seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor]:
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draws)

    labels = torch.randint(0, sum(splits), (num_tokens,), generator=draws)
    labels[1::4] = -100
    return normal(num_tokens, SIZE), [normal(size, SIZE) for size in splits], labels


def _reference(hidden: Tensor, weights: list[Tensor], labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = hidden @ torch.cat(weights).T
    predicted = Categorical(logits=logits if softcap is None else softcap * torch.tanh(logits / softcap))
    counts = labels != -100
    return predicted.log_prob(labels.clamp(min=0)) * counts, predicted.entropy() * counts


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 14),
    splits=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_scores_equal_a_computation_from_all_logits(
    num_tokens: int, splits: list[int], softcap: float | None, scale: float, seed: int
) -> None:
    hidden, weights, labels = _draw(num_tokens, splits, seed)
    found = token_scores(hidden * scale, weights, labels, softcap=softcap)
    for values, expected in zip(found, _reference(hidden * scale, weights, labels, softcap), strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-12 * scale)


def test_a_row_with_zero_probability_adds_nothing() -> None:
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-torch.inf, 0.0], [0.5, 0.0]], dtype=torch.float64)
    found = token_scores(torch.tensor([[1.0, 0.0]], dtype=torch.float64), [weight], torch.tensor([1]))
    rest = Categorical(logits=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found.entropy, rest.entropy()[None])
    torch.testing.assert_close(found.log_probs, rest.log_prob(torch.tensor(1))[None])


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def test_no_tensor_holds_all_logits() -> None:
    hidden, weights, labels = _draw(64, [512])
    head = LanguageModelHead(SIZE, 512).double()
    with torch.no_grad():
        head.weight.copy_(weights[0])
        with _Largest() as seen:
            head(hidden[None], labels=labels[None], scores=True)
    assert seen.largest <= 512 * SIZE < 64 * 512


def _sharded(softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        hidden, weights, labels = _draw(9, [26])
        head = LanguageModelHead(SIZE, 26, softcap=softcap, token_loss=CrossEntropy(z_loss=0.1, label_smoothing=0.1))
        head.double().load_state_dict({"weight": weights[0]})
        parallelize_tensor(head, ctx.mesh_for("dense")["tp"], {"": VocabParallelHead()})
        found = head(hidden[None].requires_grad_(), labels=labels[None], scores=True)
        (gradient,) = torch.autograd.grad(found["log_probs"].sum(), head.weight)
        alone = head(hidden[None], labels=labels[None], scores="log_probs")
        assert alone.keys() == {"log_probs"}
        torch.testing.assert_close(alone["log_probs"], found["log_probs"])
        return found["log_probs"][0].detach(), found["entropy"][0], full_tensor(gradient)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sharded_vocabulary_gives_the_same_scores_on_every_rank(softcap: float | None) -> None:
    hidden, weights, labels = _draw(9, [26])
    weights[0].requires_grad_()
    log_probs, entropy = _reference(hidden, weights, labels, softcap)
    (gradient,) = torch.autograd.grad(log_probs.sum(), weights[0])
    for found in run_ranks(_sharded, softcap, world_size=2):
        for values, expected in zip(found, (log_probs, entropy, gradient), strict=True):
            torch.testing.assert_close(values, expected.detach(), rtol=1e-11, atol=1e-12)


def test_scores_need_labels_and_a_cross_entropy() -> None:
    hidden, labels = torch.zeros(1, 2, SIZE), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UserError, match="got scores with no labels; expected labels"):
        LanguageModelHead(SIZE, 3)(hidden, scores=True)
    head = LanguageModelHead(SIZE, 3, token_loss=lambda logits, labels: logits[:, 0])
    with pytest.raises(UserError, match="got scores with token_loss = <function"):
        head(hidden, labels=labels, scores=True)
    candidates = torch.zeros(1, 2, 4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"got scores=True with candidates, labels of shape \(1, 2, 4\); expected one"):
        LanguageModelHead(SIZE, 3)(hidden, labels=candidates, scores=True)
    assert LanguageModelHead(SIZE, 3)(hidden, labels=candidates, scores="log_probs")["log_probs"].shape == (1, 2, 4)
