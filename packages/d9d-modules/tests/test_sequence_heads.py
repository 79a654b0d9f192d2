import pytest
import torch

from d9d_modules.pooling import Pooling, pool
from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_classes_are_scored_from_the_pooled_tokens(pooling: Pooling) -> None:
    head = ClassificationHead(4, 3, pooling=pooling, init_std=1.0)
    hidden = torch.randn(2, 3, 4)
    assert list(head.state_dict()) == ["score.weight"]
    expected = pool(hidden, MASK, pooling=pooling) @ head.score.weight.T
    torch.testing.assert_close(head(hidden, mask_BL=MASK), expected)


@pytest.mark.parametrize("embedding_size", [None, 6])
def test_embeddings_have_length_one(embedding_size: int | None) -> None:
    head = EmbeddingHead(4, embedding_size, pooling="mean", init_std=1.0).bfloat16()
    hidden = torch.randn(2, 3, 4).bfloat16()
    embedding = head(hidden, mask_BL=MASK)
    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding.norm(dim=-1), torch.ones(2))
    pooled = pool(hidden, MASK, pooling="mean")
    raw = pooled if head.projection is None else head.projection(pooled)
    torch.testing.assert_close(embedding, raw.float() / raw.float().norm(dim=-1, keepdim=True))
    head.normalize = False
    assert torch.equal(head(hidden, mask_BL=MASK), raw)


def test_a_causal_model_is_pooled_at_its_last_token() -> None:
    assert ClassificationHead(4, 3).pooling == EmbeddingHead(4).pooling == "last"
