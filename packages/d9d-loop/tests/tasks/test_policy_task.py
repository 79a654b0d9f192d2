import pytest
import torch

from d9d_dist import UserError
from d9d_loop.tasks import PolicyTask


def test_a_batch_without_advantages_is_refused() -> None:
    batch = {"labels": torch.tensor([[-100, 3, 5]]), "documents": torch.zeros(1, 3, dtype=torch.int64)}
    outputs = {"log_probs": -torch.rand(1, 3)}
    with pytest.raises(UserError, match="the batch has no advantages, only documents, labels; expected an advantage"):
        PolicyTask().loss(outputs, batch)
    assert PolicyTask().loss(outputs, {**batch, "advantages": torch.ones(1, 3)}).total.isfinite()
