import pytest
import torch
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.tasks import RewardTask

BATCH = {
    "input_ids": torch.zeros(1, 4, dtype=torch.int64),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
    "documents": torch.tensor([[0, 0, 1, 1]]),
}


def test_scores_may_have_a_dim_of_one() -> None:
    scores = torch.randn(1, 4)
    flat, deep = (RewardTask().loss(each, BATCH) for each in (scores, scores.unsqueeze(-1)))
    assert_close(flat.total, -torch.nn.functional.logsigmoid(scores[0, 1] - scores[0, 3]))
    assert_close(deep.total, flat.total)


def test_outputs_that_are_no_scores_of_positions_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"the model returned scores of shape \(1, 2\); expected \(1, 4\), one score for each position"
    ):
        RewardTask().loss(torch.randn(1, 2), BATCH)
