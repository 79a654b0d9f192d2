from typing import Any

import pytest
import torch
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.losses import PolicyLoss, PreferenceLoss
from d9d_loop.tasks import DistillationTask, NextTokenTask, PolicyTask, PreferenceTask, RewardTask


def _batch() -> dict[str, torch.Tensor]:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 3, 4]])
    labels = torch.randint(0, 9, (2, 6))
    labels[documents == torch.tensor([[2], [4]])] = -100
    return {"documents": documents, "labels": labels, "reference_log_probs": -torch.rand(2, 6)}


def test_metrics_are_margin_and_accuracy_of_the_pairs() -> None:
    batch, outputs = _batch(), {"log_probs": -torch.rand(2, 6)}
    task = PreferenceTask(PreferenceLoss(beta=0.5))
    metrics: dict[str, Any] = dict(task.metrics())
    task.update_metrics(metrics, outputs=outputs, batch=batch, loss=task.loss(outputs, batch))
    ratios = outputs["log_probs"] - batch["reference_log_probs"]
    margins = torch.stack(
        [
            ratios[0, :2].sum() - ratios[0, 2:5].sum(),
            ratios[1, 0] - ratios[1, 1],
            ratios[1, 2:4].sum() - ratios[1, 4],
        ]
    )
    expected = {"reward_margin": 0.5 * margins.mean(), "reward_accuracy": (margins > 0).float().mean()}
    for name, value in expected.items():
        assert_close(metrics[name].compute(), value, check_dtype=False)


def test_a_loss_has_a_reference_if_and_only_if_it_is_expected() -> None:
    batch, outputs = _batch(), {"log_probs": -torch.rand(2, 6)}
    without = PreferenceTask(has_reference=False)
    with pytest.raises(UserError, match="the batch has the key reference_log_probs; expected it if and only if"):
        without.loss(outputs, batch)
    zero = PreferenceTask().loss(outputs, {**batch, "reference_log_probs": torch.zeros(2, 6)})
    del batch["reference_log_probs"]
    assert_close(without.loss(outputs, batch).total, zero.total)
    with pytest.raises(UserError, match="the batch has no reference_log_probs; expected it if and only if"):
        PreferenceTask().loss(outputs, batch)


def test_router_losses_are_added_to_the_loss_but_not_to_margins() -> None:
    batch = _batch()
    plain = {"log_probs": -torch.rand(2, 6)}
    outputs = {**plain, "auxiliary_losses": torch.rand(2, 6)}
    task = PreferenceTask()
    added = task.loss(outputs, batch).total - task.loss(plain, batch).total
    auxiliary = outputs["auxiliary_losses"]
    assert_close(added, auxiliary[0, :5].mean() + auxiliary[1, :2].mean() + auxiliary[1, 2:5].mean())
    found: list[dict[str, Any]] = [dict(task.metrics()), dict(task.metrics())]
    for metrics, each in zip(found, (plain, outputs), strict=True):
        task.update_metrics(metrics, outputs=each, batch=batch, loss=task.loss(each, batch))
    assert_close(found[0]["reward_margin"].compute(), found[1]["reward_margin"].compute())


def test_a_batch_without_advantages_is_refused() -> None:
    batch = {"labels": torch.tensor([[-100, 3, 5]]), "documents": torch.zeros(1, 3, dtype=torch.int64)}
    outputs = {"log_probs": -torch.rand(1, 3)}
    with pytest.raises(UserError, match="the batch has no advantages, only documents, labels; expected an advantage"):
        PolicyTask().loss(outputs, batch)
    assert PolicyTask().loss(outputs, {**batch, "advantages": torch.ones(1, 3)}).total.isfinite()


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
    margins = RewardTask().loss(scores, {**BATCH, "margins": torch.full((1, 4), 0.5)})
    assert_close(margins.total, -torch.nn.functional.logsigmoid(scores[0, 1] - scores[0, 3] - 0.5))


def test_outputs_that_are_no_scores_of_positions_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"the model returned scores of shape \(1, 2\); expected \(1, 4\), one score for each position"
    ):
        RewardTask().loss(torch.randn(1, 2), BATCH)


LABELS = torch.tensor([[-100, 3, -100, 4], [5, -100, -100, -100]])


class _Causal(dict[str, Any]):
    """Outputs as those of a model of transformers."""


@pytest.mark.parametrize(
    "task", [PolicyTask(), PreferenceTask(has_reference=False), DistillationTask(), NextTokenTask()]
)
def test_outputs_of_a_model_that_ignores_arguments_are_an_error(task: Any) -> None:
    batch = {"labels": LABELS, "documents": torch.zeros(2, 4).long(), "advantages": torch.ones(2, 4)}
    batch["teacher_log_probs"] = torch.zeros(2, 4, 3)
    with pytest.raises(UserError, match=r"returned a _Causal with the keys logits; expected .* Use a d9d decoder"):
        task.loss(_Causal(logits=torch.zeros(2, 4, 9)), batch)


def test_the_loss_of_the_whole_batch_is_no_loss_of_tokens() -> None:
    with pytest.raises(UserError, match=r"returned a tensor of shape \(\); expected a tensor of shape \(2, 4\)"):
        NextTokenTask().loss(torch.zeros(()), {"labels": LABELS})


def test_documents_without_labels_are_padding() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [7, 3, 3, 3]])
    expected = torch.tensor([[True, True, True, True], [True, False, False, False]])
    for task in (NextTokenTask(), PolicyTask(), PreferenceTask(), DistillationTask()):
        assert torch.equal(task.token_mask({"labels": LABELS, "documents": documents}), expected)
    own = torch.zeros(2, 4, dtype=torch.bool)
    assert NextTokenTask().token_mask({"token_mask": own, "labels": LABELS, "documents": documents}) is own


def test_documents_that_are_not_one_of_a_pair_are_padding_of_rewards() -> None:
    documents = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3], [2, 2, 3, 0]])
    expected = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    assert torch.equal(RewardTask().token_mask({"documents": documents}), expected)


PAIRS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 2, 2, 3]])


@pytest.mark.parametrize("multiple", [2, 4, 8])
@pytest.mark.parametrize(
    "task",
    [
        NextTokenTask(),
        PolicyTask(PolicyLoss(kl_weight=0.1)),
        PolicyTask(PolicyLoss(average="sequences", ratio_level="sequence", kl_weight=0.1)),
        PreferenceTask(),
        PreferenceTask(PreferenceLoss(length_normalized=True)),
        RewardTask(),
        DistillationTask(),
    ],
)
def test_added_columns_do_not_change_a_loss(task: Any, multiple: int) -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.where(PAIRS == 3, -100, torch.randint(0, 9, (2, 5), generator=draws))
    batch = {"labels": labels, "documents": PAIRS, "position_ids": torch.arange(5).repeat(2, 1), "input_ids": labels}
    for key in ("advantages", "reference_log_probs", "old_log_probs", "importance"):
        batch[key] = torch.rand(2, 5, generator=draws)
    batch["teacher_log_probs"] = torch.rand(2, 5, 3, generator=draws).log_softmax(-1) - 0.1
    batch["teacher_ids"] = torch.randint(0, 9, (2, 5, 3), generator=draws)
    batch["expert_indices"] = torch.tensor([-1, 3]).view(1, 1, 2, 1).expand(2, 5, 2, 1)
    padded, num_added = task.pad_sequence(batch, multiple)
    assert num_added == -5 % multiple
    for each in (batch, padded):
        each["scores"] = torch.full(each["labels"].shape, 7.0)  # also of the padding
        each["scores"][:, :5] = -torch.arange(1, 11).view(2, 5) / 10

    def total(rows: dict[str, Any]) -> Any:
        scores = rows["scores"]
        if isinstance(task, DistillationTask):
            return task.loss({"log_probs": -scores.unsqueeze(-1).expand(-1, -1, 3).square()}, rows)
        is_plain = isinstance(task, NextTokenTask | RewardTask)
        found = scores.masked_fill(rows["labels"] < 0, 0.0) if isinstance(task, NextTokenTask) else scores
        return task.loss(found if is_plain else {"log_probs": found, "auxiliary_losses": found}, rows)

    found, expected = total(padded), total(batch)
    assert_close(found.total, expected.total)
    assert_close(found.weight, expected.weight)
    assert torch.equal(padded["expert_indices"], batch["expert_indices"][:, :1].expand(-1, 5 + num_added, -1, -1))
    assert torch.equal(padded["token_mask"][:, :5], task.token_mask(batch))
    assert not padded["token_mask"][:, 5:].any()


def test_rows_that_lack_a_key_or_differ_in_shape_are_an_error() -> None:
    rows = {"input_ids": LABELS, "labels": LABELS, "documents": torch.zeros(2, 4).long(), "position_ids": LABELS}
    for task in (NextTokenTask(), PolicyTask(), PreferenceTask(), DistillationTask()):
        with pytest.raises(
            UserError, match=r"the batch has no labels, only documents, input_ids, position_ids; expected"
        ):
            task.token_mask({key: value for key, value in rows.items() if key != "labels"})
        with pytest.raises(UserError, match=r"'labels': \(2, 3\), 'documents': \(2, 4\)}; expected equal shapes"):
            task.token_mask({**rows, "labels": LABELS[:, :3]})
    for task in (NextTokenTask(), RewardTask()):
        with pytest.raises(
            UserError, match=r"the batch has no position_ids and no documents, only input_ids; expected"
        ):
            task.inputs({"input_ids": LABELS})
