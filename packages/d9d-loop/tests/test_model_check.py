import pytest
from torch import nn

from d9d_dist import UserError
from d9d_loop.model_check import check_layers


def test_layers_that_see_which_samples_share_a_rank_are_refused_by_name() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Embedding(4, 2, padding_idx=0),
            "clipped": nn.Embedding(4, 2, max_norm=1.0),
            "counted": nn.EmbeddingBag(4, 2, scale_grad_by_freq=True),
        }
    )
    with pytest.raises(UserError, match="on several ranks the model would train differently than on one") as error:
        check_layers(model)
    assert "  clipped: max_norm = 1.0 writes to the rows that this rank looks up." in str(error.value)
    assert "  counted: scale_grad_by_freq divides gradients by counts of this rank's batch." in str(error.value)
    assert "plain" not in str(error.value)
    check_layers(nn.ModuleList([model["plain"], nn.Linear(2, 2)]))
