import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.losses import DistillationLoss

pytestmark = pytest.mark.usefixtures("trl_without_wandb")


def _log_probs(k: int = 9) -> torch.Tensor:
    return torch.randn(2, 5, k, dtype=torch.float64).log_softmax(-1)


def test_all_tokens_as_candidates_give_the_kl_divergence() -> None:
    student, teacher = _log_probs(), _log_probs()
    mask = torch.rand(2, 5) < 0.7
    expected = F.kl_div(student[mask], teacher[mask], reduction="sum", log_target=True)
    for loss in (DistillationLoss(with_rest=False), DistillationLoss(with_rest=False, normalized=True)):
        found = loss(student, teacher_log_probs_BLK=teacher, mask_BL=mask)
        assert_close(found.total, expected)
        assert found.weight == mask.sum()


def test_the_rest_of_the_vocabulary_counts_as_one_more_candidate() -> None:
    student, teacher = _log_probs(), _log_probs()
    ours, theirs = (torch.cat((p[..., :4], p[..., 4:].logsumexp(-1, keepdim=True)), -1) for p in (student, teacher))
    expected = F.kl_div(ours, theirs, reduction="sum", log_target=True)
    every = torch.ones(2, 5, dtype=torch.bool)
    found = DistillationLoss()(student[..., :4], teacher_log_probs_BLK=teacher[..., :4], mask_BL=every)
    assert_close(found.total, expected)
    same = DistillationLoss()(teacher[..., :4], teacher_log_probs_BLK=teacher[..., :4], mask_BL=every)
    assert_close(same.total, torch.tensor(0.0, dtype=torch.float64))


@pytest.mark.slow
def test_losses_and_gradients_equal_trl() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    server = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    logits, teacher, mask = torch.randn(2, 5, 9).double().requires_grad_(), _log_probs(), torch.rand(2, 5) < 0.7
    labels = torch.where(mask, 1, -100)
    student = logits.log_softmax(-1)
    everything = DistillationLoss(with_rest=False)(student, teacher_log_probs_BLK=teacher, mask_BL=mask)
    expected = gkd.GKDTrainer.generalized_jsd_loss(logits, teacher, labels, beta=0, reduction="sum")
    assert_close(everything.total, expected)
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (everything.total, expected)))
    top = DistillationLoss()(student[..., :4], teacher_log_probs_BLK=teacher[..., :4], mask_BL=mask)
    valid = torch.ones(2, 5, 4, dtype=torch.bool)
    tails = [server._add_tail_bucket(each[..., :4], valid) for each in (student, teacher)]
    expected = server._jsd_divergence(tails[0][0], tails[1][0], 0, tails[0][1])[mask].sum()
    assert_close(top.total, expected)
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (top.total, expected)))


def test_missing_candidates_do_not_change_the_loss() -> None:
    student, teacher = _log_probs(4).requires_grad_(), _log_probs(4)
    teacher[..., 3] = -torch.inf
    every = torch.ones(2, 5, dtype=torch.bool)
    found = DistillationLoss(with_rest=False)(student, teacher_log_probs_BLK=teacher, mask_BL=every)
    three = DistillationLoss(with_rest=False)(student[..., :3], teacher_log_probs_BLK=teacher[..., :3], mask_BL=every)
    assert_close(found.total, three.total)
    (gradient,) = torch.autograd.grad(found.total, student)
    assert gradient.isfinite().all()


def test_a_rest_and_normalized_candidates_exclude_each_other() -> None:
    with pytest.raises(UserError, match="with_rest and normalized are both set"):
        DistillationLoss(normalized=True)


def test_unused_slots_belong_to_the_rest_whatever_token_they_name() -> None:
    """Rows have different numbers of candidates, as written by a teacher with top-p."""
    logits, teacher = torch.randn(2, 5, 9).double().requires_grad_(), _log_probs()
    student = logits.log_softmax(-1)
    num_used = torch.tensor([[4, 3, 1, 2, 0], [4, 4, 2, 3, 1]])
    is_used = torch.arange(4) < num_used.unsqueeze(-1)
    ids = torch.arange(4).expand(2, 5, 4).where(is_used, 0)  # an unused slot repeats a token
    given = teacher.gather(-1, ids).masked_fill(~is_used, -torch.inf)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for place in range(5):
            used = int(num_used[row, place])
            ours, theirs = (
                torch.cat((p[row, place, :used], p[row, place, used:].logsumexp(-1, keepdim=True)))
                for p in (student, teacher)
            )
            expected = expected + F.kl_div(ours, theirs, reduction="sum", log_target=True)
    every = torch.ones(2, 5, dtype=torch.bool)
    found = DistillationLoss()(student.gather(-1, ids), teacher_log_probs_BLK=given, mask_BL=every)
    assert_close(found.total, expected)
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found.total, expected)))
    same = DistillationLoss()(teacher.gather(-1, ids), teacher_log_probs_BLK=given, mask_BL=every)
    assert_close(same.total, torch.zeros((), dtype=torch.float64))


def test_values_that_torch_would_broadcast_are_an_error() -> None:
    student, teacher, mask = _log_probs(4), _log_probs(4), torch.ones(2, 5, dtype=torch.bool)
    loss = DistillationLoss(with_rest=False)
    with pytest.raises(
        UserError, match=r"teacher_log_probs_BLK has shape \(2, 5, 1\), and the log-probabilities \(2, 5, 4"
    ):
        loss(student, teacher_log_probs_BLK=teacher[..., :1], mask_BL=mask)
    with pytest.raises(UserError, match=r"mask_BL has shape \(1, 5\)"):
        loss(student, teacher_log_probs_BLK=teacher, mask_BL=mask[:1])
    with pytest.raises(UserError, match=r"auxiliary_losses_BL has shape \(2, 1\)"):
        loss(student, teacher_log_probs_BLK=teacher, mask_BL=mask, auxiliary_losses_BL=torch.ones(2, 1))


def test_logits_of_a_teacher_are_an_error_and_its_gradient_is_dropped() -> None:
    student, teacher, mask = _log_probs(), _log_probs().requires_grad_(), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(UserError, match=r"probabilities of the candidates of a position sum to .*; expected at most 1"):
        DistillationLoss()(student, teacher_log_probs_BLK=teacher + 0.5, mask_BL=mask)
    assert not DistillationLoss()(student, teacher_log_probs_BLK=teacher.bfloat16(), mask_BL=mask).total.requires_grad
    empty = DistillationLoss()(student[:0], teacher_log_probs_BLK=teacher[:0], mask_BL=mask[:0])
    assert empty.total == 0
    outside = torch.where(mask.unsqueeze(-1), torch.nan, teacher)
    assert DistillationLoss()(student, teacher_log_probs_BLK=outside, mask_BL=~mask).total == 0
