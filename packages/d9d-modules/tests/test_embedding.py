import torch

from d9d_modules import TokenEmbedding


def test_looks_up_rows() -> None:
    embedding = TokenEmbedding(10, 4)
    assert torch.equal(embedding(torch.tensor([[3, 9]])), embedding.weight[torch.tensor([[3, 9]])])


def test_starts_from_the_given_normal_distribution() -> None:
    embedding = TokenEmbedding(500, 200, init_std=0.1)
    for _ in range(2):
        assert abs(embedding.weight.std().item() - 0.1) < 0.002
        torch.nn.init.zeros_(embedding.weight)
        embedding.reset_parameters()
