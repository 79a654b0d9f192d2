import pytest
import torch
from packed_rows import packed_rows
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.losses import truncated_importance


def test_ratios_are_truncated() -> None:
    rows = packed_rows()
    trained, rollout = rows.values(), rows.values()
    found = truncated_importance(trained, rollout, mask_BL=rows.mask, document_ids_BL=rows.document_ids, maximum=1.5)
    assert_close(found, torch.where(rows.mask, (trained - rollout).exp().clamp(max=1.5), 1.0))
    assert (found == 1.5).any()
    assert not found.requires_grad


def test_the_weight_of_a_sequence_is_the_truncated_product_of_token_ratios() -> None:
    rows = packed_rows()
    trained = rows.values()
    rollout = trained + 0.1 * torch.randn(trained.shape, dtype=torch.float64)
    found = truncated_importance(
        trained, rollout, mask_BL=rows.mask, document_ids_BL=rows.document_ids, maximum=1.05, level="sequence"
    )
    for weights, ours, theirs in zip(*map(rows.take, (found, trained, rollout)), strict=True):
        assert_close(weights, (ours - theirs).exp().prod().clamp(max=1.05).expand_as(weights))


def test_a_maximum_below_one_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(UserError, match=r"maximum = 0.5; expected 1 or more"):
        truncated_importance(one, one, mask_BL=one.bool(), document_ids_BL=one.long(), maximum=0.5)
