import pytest
import torch

from d9d_dist import UserError, materialize
from d9d_modules import TokenEmbedding
from d9d_modules.embedding import SplitTokenEmbedding


def test_looks_up_rows() -> None:
    embedding = TokenEmbedding(10, 4)
    assert torch.equal(embedding(torch.tensor([[3, 9]])), embedding.weight[torch.tensor([[3, 9]])])


def test_weights_are_drawn_from_the_given_normal_distribution() -> None:
    embedding = TokenEmbedding(500, 200, init_std=0.1)
    for _ in range(2):
        assert abs(embedding.weight.std().item() - 0.1) < 0.002
        torch.nn.init.zeros_(embedding.weight)
        embedding.reset_parameters()


@pytest.mark.parametrize("splits", [{"orig": 9}, {"orig": 6, "special": 3}, {"a": 1, "b": 2, "c": 6}])
def test_an_embedding_with_named_splits_equals_one_table(splits: dict[str, int]) -> None:
    embedding = SplitTokenEmbedding(splits, 4)
    names = ["weight"] if len(splits) == 1 else [f"weight_{split}" for split in splits]
    assert list(embedding.state_dict()) == names
    whole = torch.cat([embedding.get_parameter(name).detach() for name in names]).requires_grad_()
    ids, gradient = torch.randint(0, 9, (3, 5)), torch.randn(3, 5, 4)
    vectors = embedding(ids)
    assert torch.equal(vectors, whole[ids])
    vectors.backward(gradient)
    whole[ids].backward(gradient)
    grads = [grad for name in names if (grad := embedding.get_parameter(name).grad) is not None]
    torch.testing.assert_close(torch.cat(grads), whole.grad)


def test_late_initialization_of_a_split_embedding() -> None:
    with torch.device("meta"):
        embedding = SplitTokenEmbedding({"orig": 600, "special": 400}, 100, init_std=0.1)
        assert embedding(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 100)
    materialize(embedding, device=torch.device("cpu"), seed=0)
    for weight in embedding.parameters():
        assert abs(weight.std().item() - 0.1) < 0.002
    assert not torch.equal(embedding.get_parameter("weight_orig")[:400], embedding.get_parameter("weight_special"))


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_out_of_range_raise(bad: int) -> None:
    with pytest.raises(UserError, match=rf"got token ids from {bad} to {bad}; expected token ids within 0 ... 4\."):
        SplitTokenEmbedding({"orig": 3, "special": 2}, 4)(torch.tensor([[0, bad]]))
