import pytest
import torch

from d9d_dist import UserError
from d9d_dist.token_ids import check_token_ids


def test_the_error_states_the_range_of_invalid_token_ids() -> None:
    check_token_ids(torch.tensor([[0, 4], [-100, 2]]), 5, what="labels", ignored=-100)
    check_token_ids(torch.empty(0, 3, dtype=torch.int64), 5, what="labels")
    check_token_ids(torch.empty(2, 3, dtype=torch.int64, device="meta"), 5, what="labels")
    with pytest.raises(UserError, match=r"got labels from -7 to 9; expected labels within 0 \.\.\. 4 or -100\."):
        check_token_ids(torch.tensor([1, 9, -7, -100, 5]), 5, what="labels", ignored=-100)
    with pytest.raises(UserError, match=r"got token ids from -100 to -100; expected token ids within 0 \.\.\. 4\."):
        check_token_ids(torch.tensor([1, -100]), 5, what="token ids")
