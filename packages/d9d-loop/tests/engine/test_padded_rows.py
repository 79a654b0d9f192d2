"""Rows of any length in layouts that need a multiple: the engine pads them, and removes the padding from results."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_loop import Engine, Loss
from d9d_loop.losses import PolicyLoss
from d9d_loop.tasks import PolicyTask

VOCAB = 9
TASK = PolicyTask(PolicyLoss(average="sequences"))


class _Model(nn.Module):
    """Model without attention, which also sums a loss over all tokens in the mask, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Embedding(VOCAB, VOCAB).double()

    def forward(
        self, ids: Tensor, *, labels: Tensor, mask_BL: Tensor, scores: Any, **others: Tensor
    ) -> dict[str, Tensor]:
        assert all(each.shape == ids.shape for each in others.values())
        log_probs = self.logits(ids).log_softmax(-1)
        found = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        auxiliary = log_probs[..., 0] * mask_BL
        return {"log_probs": torch.where(labels >= 0, found, 0.0), "auxiliary_losses": auxiliary}


def _batch(length: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(length)
    ids, labels = torch.randint(0, VOCAB, (2, 2, length), generator=draws)
    documents = (torch.arange(length) >= 2).long().repeat(2, 1)
    labels[:, :1] = -100
    advantages, old = torch.randn(2, 2, length, generator=draws, dtype=torch.float64)
    return {
        "input_ids": ids,
        "labels": labels,
        "documents": documents,
        "position_ids": torch.arange(length).repeat(2, 1),
        "advantages": advantages,
        "old_log_probs": -2.0 + 0.1 * old,
    }


def _loss(outputs: dict[str, Tensor], batch: Any) -> Loss:
    return replace(TASK.loss(outputs, batch), tokens={"log_probs": outputs["log_probs"]})


def _step(degrees: dict[str, int]) -> tuple[list[Tensor], list[Tensor], float, float]:
    with MeshConfig(**degrees).build() as ctx:
        model = _Model()
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx=ctx, task=TASK)
        batches = [_batch(length) for length in (5, 8, 7)]
        scores = engine.score(batches)
        tokens = engine.forward_backward(batches, _loss)
        result = engine.step()
        found = [[each["log_probs"] for each in values] for values in (scores, tokens)]
        return found[0], found[1], result.loss.item(), result.grad_norm.item()


@pytest.mark.parametrize("axis", ["context_parallel_shard", "tensor_parallel"])
def test_rows_of_any_length_give_the_same_results_in_each_layout(axis: str) -> None:
    (expected,) = run_ranks(_step, {}, world_size=1)
    for found in run_ranks(_step, {axis: 2}, world_size=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert [tuple(each.shape) for each in found[0]] == [(2, 5), (2, 8), (2, 7)]


def test_a_batch_of_the_right_length_is_not_copied() -> None:
    batch = _batch(8)
    assert TASK.pad_sequence(batch, 4) == (batch, 0)
    padded, num_added = TASK.pad_sequence(batch, 3)
    assert num_added == 1
    assert all(torch.equal(padded[key][:, :8], value) for key, value in batch.items())
    assert torch.equal(padded["token_mask"], F.pad(TASK.token_mask(batch), (0, 1)))
