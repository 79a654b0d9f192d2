import pytest
from torch import nn

from d9d_dist import UserError
from d9d_loop.model_check import check_layers


def test_a_bag_that_counts_its_ranks_rows_is_refused_by_name() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Embedding(4, 2, scale_grad_by_freq=True),
            "counted": nn.EmbeddingBag(4, 2, scale_grad_by_freq=True),
        }
    )
    with pytest.raises(UserError, match=r"^counted: an nn.EmbeddingBag with scale_grad_by_freq divides gradients by"):
        check_layers(model)
    check_layers(model["plain"])
