"""Task of sampled answers: policy gradients."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from d9d_dist import UserError
from d9d_loop.losses.policy import PolicyLoss
from d9d_loop.task import Loss
from d9d_loop.tasks.packed_inputs import PackedBatch, PackedTask, packed_inputs, score_arguments
from d9d_pipeline import Inputs

GRPO = PolicyLoss()
"""Clipped loss per token, as in GRPO, averaged over the tokens of the batch."""


@final
class PolicyTask(PackedTask):
    """Policy-gradient loss of packed answers, for a decoder whose forward takes `scores`.

    A batch has packed rows whose labels are the sampled tokens, -100 elsewhere, and `advantages` [B, L]. Optional keys,
    [B, L] each: `old_log_probs`, `reference_log_probs` and `importance`; see `PolicyLoss`. Router losses of the model
    are added, and do not change the ratios.

    Args:
        loss: Loss of the sampled tokens.

    Raises:
        UserError: In `loss`, if the batch has no `advantages`.
    """

    weight_unit = "tokens"

    def __init__(self, loss: PolicyLoss = GRPO) -> None:
        self._loss = loss
        if loss.average != "tokens":
            self.weight_unit = "answers"

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, for scores."""
        return packed_inputs(batch, scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of the sampled tokens."""
        if "advantages" not in batch:
            raise UserError(
                f"the batch has no advantages, only {', '.join(sorted(batch))}; expected an advantage for each "
                "position, [B, L]. Add the key."
            )
        return self._loss(
            **score_arguments(outputs, batch),
            advantages_BL=batch["advantages"],
            old_log_probs_BL=batch.get("old_log_probs"),
            importance_BL=batch.get("importance"),
        )
