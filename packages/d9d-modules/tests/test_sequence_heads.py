import pytest
import torch

from d9d_dist import MeshConfig, UserError, parallelize_context
from d9d_dist.testing import run_ranks
from d9d_modules.attention import GroupedQueryAttention
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


def _ask_for_context_parallelism() -> list[str]:
    messages = []
    attention = GroupedQueryAttention(4, num_heads=2, num_kv_heads=1, head_dim=2)
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        for head in (ClassificationHead(4, 3), EmbeddingHead(4)):
            model = torch.nn.ModuleDict({"attention": attention, "head": head})
            with pytest.raises(UserError) as caught:
                parallelize_context(model, ctx.mesh_for("batch")["cp"])
            messages.append(str(caught.value))
    return messages


def test_pooled_heads_reject_context_parallelism() -> None:
    rest = "pools whole sequences, but 2 context-parallel ranks shard each sequence; expected one context-parallel rank"
    for messages in run_ranks(_ask_for_context_parallelism, world_size=2):
        for message, name in zip(messages, ("ClassificationHead", "EmbeddingHead"), strict=True):
            assert message.startswith(f"head, a {name}, {rest}")


def test_a_causal_model_is_pooled_at_its_last_token() -> None:
    assert ClassificationHead(4, 3).pooling == EmbeddingHead(4).pooling == "last"
