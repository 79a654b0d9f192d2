from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packed_rows import Rows, packed_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing import assert_close

from d9d_dist import ContextSplit, UserError
from d9d_dist.testing import run_ranks
from d9d_loop.losses import PreferenceLoss, RewardLoss
from d9d_loop.losses.document_sums import sum_per_document

pytestmark = pytest.mark.usefixtures("trl_without_wandb")


def _mean(loss: PreferenceLoss, rows: Rows, policy: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    found = loss(policy, reference_log_probs_BL=reference, mask_BL=rows.mask, document_ids_BL=rows.document_ids)
    assert found.weight == 6  # two pairs in each of three rows
    return found.total / found.weight


def _trl(rows: Rows, policy: torch.Tensor, reference: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute the loss of trl's DPOTrainer, with models that return the given log-probabilities."""
    dpo = pytest.importorskip("trl.trainer.dpo_trainer")
    padded = [torch.cat((each[0::2], each[1::2])) for each in map(rows.padded, (policy, reference))]
    lengths = torch.tensor([len(each) for each in rows.take(policy)])
    mask = torch.arange(padded[0].shape[1]) < torch.cat((lengths[0::2], lengths[1::2])).unsqueeze(1)
    models = [
        lambda *, each=each, **_: SimpleNamespace(log_probs=each, entropy=each, mean_logits=each, is_top1=each > 0)
        for each in padded
    ]
    first = torch.zeros(len(mask), 1, dtype=torch.bool)
    inputs = {
        "input_ids": torch.zeros(len(mask), mask.shape[1] + 1).long(),
        "completion_mask": torch.cat((first, mask), 1),
        "attention_mask": torch.ones(1),
    }
    settings = {"beta": 0.1, "label_smoothing": 0.0, "loss_types": ["sigmoid"], "loss_weights": [1.0]} | options
    trainer = MagicMock(
        **settings,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ref_model=models[1],
        args=MagicMock(gradient_checkpointing_kwargs=None),
    )
    trainer.accelerator.device = "cpu"
    trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda value: value
    model = MagicMock(side_effect=models[0], training=True)
    return dpo.DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PreferenceLoss(), {}),
        (PreferenceLoss(beta=0.3), {"beta": 0.3}),
        (PreferenceLoss(beta=0.3, kind="hinge"), {"beta": 0.3, "loss_types": ["hinge"]}),
        (PreferenceLoss(beta=0.3, kind="squared", length_normalized=True), {"beta": 0.3, "loss_types": ["ipo"]}),
        (PreferenceLoss(beta=2.0, length_normalized=True), {"beta": 2.0, "loss_types": ["sigmoid_norm"]}),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else "",
)
def test_losses_and_gradients_equal_trl(ours: PreferenceLoss, theirs: dict[str, Any]) -> None:
    rows = packed_rows()
    policy, reference = rows.values().requires_grad_(), rows.values()
    found, expected = _mean(ours, rows, policy, reference), _trl(rows, policy, reference, **theirs)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, policy)[0] for loss in (found, expected)))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PreferenceLoss(beta=0.3, label_smoothing=0.2), {"loss_type": "sigmoid", "label_smoothing": 0.2}),
        (
            PreferenceLoss(beta=2.0, length_normalized=True, target_margin=0.7, label_smoothing=0.1),
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1},
        ),
    ],
    ids=["conservative", "simpo"],
)
def test_losses_without_a_reference_equal_trl(ours: PreferenceLoss, theirs: dict[str, Any]) -> None:
    """trl has conservative labels and target margins in its CPOTrainer."""
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    rows = packed_rows()
    policy = rows.values().requires_grad_()
    trainer = SimpleNamespace(alpha=0.0, accelerator=SimpleNamespace(device="cpu"), **({"beta": 0.3} | theirs))
    answers = torch.stack([each.mean() if ours.length_normalized else each.sum() for each in rows.take(policy)])
    expected = cpo.CPOTrainer.cpo_loss(trainer, answers[0::2], answers[1::2])[0].mean()
    found = _mean(ours, rows, policy, None)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, policy)[0] for loss in (found, expected)))


def test_smoothing_margin_and_answer_weight_equal_their_formulas() -> None:
    rows = packed_rows()
    policy, reference = rows.values(), rows.values()
    scores = torch.stack([(p - r).sum() for p, r in zip(rows.take(policy), rows.take(reference), strict=True)])
    logits = 0.5 * (scores[0::2] - scores[1::2]) - 0.7
    p = torch.sigmoid(logits)
    answers = torch.stack([-each.mean() for each in rows.take(policy)[0::2]])
    expected = (-0.8 * p.log() - 0.2 * (1 - p).log() + 0.3 * answers).mean()
    loss = PreferenceLoss(beta=0.5, label_smoothing=0.2, target_margin=0.7, answer_weight=0.3)
    assert_close(_mean(loss, rows, policy, reference), expected)


def test_a_loss_has_the_collectives_of_four_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of log-ratios, tokens, log-probabilities of chosen answers, and router losses."""
    rows, sums = packed_rows(), MagicMock(wraps=sum_per_document)
    monkeypatch.setattr("d9d_loop.losses.preference.sum_per_document", sums)
    ids, losses = rows.document_ids, torch.ones_like(rows.values())
    policy = rows.values()
    PreferenceLoss(answer_weight=0.3, length_normalized=True)(
        policy, reference_log_probs_BL=policy, mask_BL=rows.mask, document_ids_BL=ids, auxiliary_losses_BL=losses
    )
    assert sums.call_count == 4


def test_simpo_needs_no_reference() -> None:
    rows = packed_rows()
    policy = rows.values()
    means = torch.stack([each.mean() for each in rows.take(policy)])
    expected = -F.logsigmoid(2.0 * (means[0::2] - means[1::2]) - 1.0).mean()
    assert_close(
        _mean(PreferenceLoss(beta=2.0, length_normalized=True, target_margin=1.0), rows, policy, None), expected
    )


def test_a_pair_without_labels_is_not_counted() -> None:
    rows = packed_rows()
    policy = rows.values().requires_grad_()
    rows.mask[0][rows.document_ids[0] == 1] = False
    policy.data[0][rows.document_ids[0] == 1] = -torch.inf  # not even by a product with 0
    loss = PreferenceLoss(answer_weight=0.5)
    found = loss(policy, reference_log_probs_BL=None, mask_BL=rows.mask, document_ids_BL=rows.document_ids)
    assert found.weight == 5
    (gradient,) = torch.autograd.grad(found.total, policy)
    assert gradient.isfinite().all()
    assert not gradient[0][rows.document_ids[0] <= 1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0; expected a number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing = 0.5; expected the probability"),
        ({"kind": "squared", "label_smoothing": 0.1}, "label_smoothing is set, but the kind 'squared' does not use it"),
        ({"kind": "hinge", "target_margin": 0.1}, "target_margin is set, but the kind 'hinge' does not use it"),
        ({"answer_weight": -1.0}, "answer_weight = -1.0; expected 0 or more"),
        ({"kind": "DPO"}, "kind = 'DPO'; expected one of sigmoid, squared, hinge"),
        ({"beta": torch.nan}, "beta = nan; expected a finite number"),
        ({"target_margin": torch.inf}, "target_margin = inf; expected a finite number"),
        ({"answer_weight": torch.nan}, "answer_weight = nan; expected a finite number"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PreferenceLoss(**options)


@pytest.mark.parametrize("kind", ["sigmoid", "squared", "hinge"])
def test_values_of_an_answer_without_a_partner_do_not_count(kind: Any) -> None:
    rows, loss = packed_rows(), PreferenceLoss(kind=kind)
    rows.mask[0][rows.document_ids[0] == 1] = False
    found = []
    for value in (0.0, -torch.inf):
        torch.manual_seed(0)
        policy = rows.values()
        policy[0][rows.document_ids[0] == 0] = value
        policy.requires_grad_()
        total = loss(policy, reference_log_probs_BL=None, mask_BL=rows.mask, document_ids_BL=rows.document_ids).total
        found.append((total, *torch.autograd.grad(total, policy)))
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_the_reference_is_a_constant() -> None:
    rows = packed_rows()
    policy = rows.values().requires_grad_()
    gradients = []
    for reference in (policy * 0.9, policy.detach() * 0.9):
        found = PreferenceLoss()(
            policy, reference_log_probs_BL=reference, mask_BL=rows.mask, document_ids_BL=rows.document_ids
        )
        gradients.append(torch.autograd.grad(found.total, policy)[0])
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_the_loss_equals_its_formula() -> None:
    rows = packed_rows()
    scores = rows.values().requires_grad_()
    last = torch.stack([each[-1] for each in rows.take(scores, trained=False)])
    chosen, rejected = last[0::2], last[1::2]
    of_pairs = torch.arange(6.0)
    expected = -F.logsigmoid(chosen - rejected - 0.2 - of_pairs).sum() + 0.1 * (chosen + rejected).square().sum()
    padded = torch.cat((of_pairs.view(3, 2), torch.zeros(3, 1)), 1)
    found = RewardLoss(centering=0.1, margin=0.2)(
        scores,
        position_ids_BL=rows.position_ids,
        document_ids_BL=rows.document_ids,
        margins_BL=padded.gather(1, rows.document_ids // 2),
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
    inputs = {"attention_mask": torch.ones(12, 1), "margin": torch.arange(6.0)}
    expected = reward.RewardTrainer.compute_loss(trainer, model, inputs)
    margins = torch.cat((inputs["margin"].view(3, 2), torch.zeros(3, 1)), 1).gather(1, rows.document_ids // 2)
    found = RewardLoss(centering=0.1)(
        scores, position_ids_BL=rows.position_ids, document_ids_BL=rows.document_ids, margins_BL=margins
    )
    assert_close(found.total / found.weight, expected)
    assert_close(*(torch.autograd.grad(loss, scores)[0] for loss in (found.total / found.weight, expected)))


def test_padding_is_not_counted_as_an_answer() -> None:
    rows = packed_rows(num_documents=2)
    found = RewardLoss()(rows.values(), position_ids_BL=rows.position_ids, document_ids_BL=rows.document_ids)
    assert found.weight == 3


def test_scores_of_documents_without_a_partner_do_not_count() -> None:
    documents, positions = torch.tensor([[0, 0, 1, 3, 4, 4]]), torch.arange(6)[None]
    scores = torch.tensor([[torch.nan, 2.0, 3.0, torch.inf, 1.0, torch.nan]], requires_grad=True)
    found = RewardLoss(centering=0.1)(scores, position_ids_BL=positions, document_ids_BL=documents)
    assert_close(found.total, -F.logsigmoid(torch.tensor(2.0 - 3.0)) + 0.1 * 25.0)
    (gradient,) = torch.autograd.grad(found.total, scores)
    assert gradient[0].nonzero().flatten().tolist() == [1, 2]


def test_equal_positions_in_a_document_are_an_error() -> None:
    documents = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(UserError, match=r"several positions of a document have its largest position id; expected asc"):
        RewardLoss()(torch.ones(1, 4), position_ids_BL=torch.zeros(1, 4).long(), document_ids_BL=documents)


def test_negative_centering_is_refused() -> None:
    with pytest.raises(UserError, match=r"margin = nan; expected a finite number"):
        RewardLoss(margin=torch.nan)
    with pytest.raises(UserError, match=r"centering = -1.0; expected 0 or more"):
        RewardLoss(centering=-1.0)


def _reward_of_a_rank(restarts: bool) -> torch.Tensor:
    split = ContextSplit(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    torch.manual_seed(3)
    rows = packed_rows(length=24)
    positions = rows.position_ids if restarts else torch.arange(24).expand(3, 24)
    margins = rows.document_ids // 2 + 0.5
    scores, positions, documents, margins = split.split((rows.values(), positions, rows.document_ids, margins))
    ids: dict[str, Any] = {"position_ids_BL": positions, "document_ids_BL": documents}
    loss = RewardLoss()(scores, **ids, margins_BL=margins, cp=split.mesh)
    return torch.stack([loss.total, torch.as_tensor(loss.weight).double()])


@pytest.mark.parametrize("restarts", [True, False])
def test_positions_may_count_over_the_row_on_context_parallel_ranks(restarts: bool) -> None:
    torch.manual_seed(3)
    rows = packed_rows(length=24)
    ids: dict[str, Any] = {"position_ids_BL": rows.position_ids, "document_ids_BL": rows.document_ids}
    whole = RewardLoss()(rows.values(), **ids, margins_BL=rows.document_ids // 2 + 0.5)
    parts = torch.stack(run_ranks(_reward_of_a_rank, restarts, world_size=2)).sum(0)
    assert_close(parts, torch.stack([whole.total, torch.as_tensor(whole.weight).double()]))
