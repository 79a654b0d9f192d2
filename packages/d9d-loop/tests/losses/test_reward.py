from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from packed_rows import packed_rows
from torch.nn import functional as F
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.losses import RewardLoss


def test_the_loss_equals_its_formula() -> None:
    rows = packed_rows()
    scores = rows.values().requires_grad_()
    last = torch.stack([each[-1] for each in rows.take(scores, trained=False)])
    chosen, rejected = last[0::2], last[1::2]
    expected = -F.logsigmoid(chosen - rejected - 0.2).sum() + 0.1 * (chosen + rejected).square().sum()
    found = RewardLoss(centering=0.1, margin=0.2)(
        scores, position_ids_BL=rows.position_ids, document_ids_BL=rows.document_ids
    )
    assert found.weight == 6
    assert_close(found.total, expected)
    assert_close(*(torch.autograd.grad(loss, scores)[0] for loss in (found.total, expected)))


def test_loss_and_gradient_equal_trl() -> None:
    reward = pytest.importorskip("trl.trainer.reward_trainer")
    rows = packed_rows()
    scores = rows.values().requires_grad_()
    last = torch.stack([each[-1] for each in rows.take(scores, trained=False)])
    trainer = MagicMock(args=MagicMock(center_rewards_coefficient=0.1), _total_train_tokens=0, _tp_size=1)
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda value: value
    model = MagicMock(return_value=SimpleNamespace(logits=torch.cat((last[0::2], last[1::2])).unsqueeze(1)))
    inputs = {"attention_mask": torch.ones(12, 1), "margin": torch.full((6,), 0.2)}
    expected = reward.RewardTrainer.compute_loss(trainer, model, inputs)
    found = RewardLoss(centering=0.1, margin=0.2)(
        scores, position_ids_BL=rows.position_ids, document_ids_BL=rows.document_ids
    )
    assert_close(found.total / found.weight, expected)
    assert_close(*(torch.autograd.grad(loss, scores)[0] for loss in (found.total / found.weight, expected)))


def test_padding_is_not_counted_as_an_answer() -> None:
    rows = packed_rows(num_documents=2)
    found = RewardLoss()(rows.values(), position_ids_BL=rows.position_ids, document_ids_BL=rows.document_ids)
    assert found.weight == 3


def test_negative_centering_is_refused() -> None:
    with pytest.raises(UserError, match=r"centering = -1.0; expected 0 or more"):
        RewardLoss(centering=-1.0)
