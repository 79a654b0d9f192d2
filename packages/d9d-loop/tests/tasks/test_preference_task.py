from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop import Task
from d9d_loop.job.job_check import check_likelihoods
from d9d_loop.losses import PreferenceLoss
from d9d_loop.tasks import NextTokenTask, PolicyTask, PreferenceTask


def _batch() -> dict[str, torch.Tensor]:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 3, 4]])
    labels = torch.randint(0, 9, (2, 6))
    labels[documents == torch.tensor([[2], [4]])] = -100
    return {"documents": documents, "labels": labels, "reference_log_probs": -torch.rand(2, 6)}


def test_metrics_are_margin_and_accuracy_of_the_pairs() -> None:
    batch, losses = _batch(), torch.rand(2, 6)
    task = PreferenceTask(PreferenceLoss(beta=0.5))
    metrics: dict[str, Any] = dict(task.metrics())
    task.update_metrics(metrics, outputs=losses, batch=batch, loss=task.loss(losses, batch))
    ratios = -losses - batch["reference_log_probs"]
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


def test_without_reference_log_probabilities_there_is_no_reference() -> None:
    batch, losses = _batch(), torch.rand(2, 6)
    del batch["reference_log_probs"]
    zero = PreferenceTask().loss(losses, {**batch, "reference_log_probs": torch.zeros(2, 6)})
    assert_close(PreferenceTask().loss(losses, batch).total, zero.total)


@pytest.mark.parametrize("task", [PreferenceTask(), PolicyTask()], ids=["preference", "policy"])
def test_a_model_that_adds_other_losses_is_refused(task: Task) -> None:
    class AddsLosses(nn.Linear):
        returns_likelihoods = False

    message = "uses the losses of AddsLosses as negative log-likelihoods, but the model adds router losses"
    with pytest.raises(UserError, match=message):
        check_likelihoods(task, AddsLosses(1, 1))
    check_likelihoods(task, nn.Linear(1, 1))
    check_likelihoods(NextTokenTask(), AddsLosses(1, 1))
