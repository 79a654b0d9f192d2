"""Task of distillation from a teacher's most probable tokens."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from d9d_loop.losses.distillation import DistillationLoss
from d9d_loop.task import Loss
from d9d_loop.tasks.packed_inputs import PackedBatch, PackedTask, packed_inputs, trained
from d9d_pipeline import Inputs

KL_DIVERGENCE = DistillationLoss()
"""KL divergence with the rest of the vocabulary as one outcome."""


@final
class DistillationTask(PackedTask):
    """Distillation loss of packed rows, for a decoder whose forward takes `scores`.

    A batch has packed rows, `teacher_ids` [B, L, K], int64, the teacher's most probable next tokens, and
    `teacher_log_probs` [B, L, K]. Positions whose label is -100 do not contribute to the loss. The model gets
    `teacher_ids` as its labels, and returns their log-probabilities [B, L, K]. Router losses of the model are added.

    Args:
        loss: Loss of a position.
    """

    weight_unit = "tokens"

    def __init__(self, loss: DistillationLoss = KL_DIVERGENCE) -> None:
        self._loss = loss

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, with the teacher's tokens as labels."""
        return packed_inputs(batch, labels=batch["teacher_ids"], scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of all positions with a label."""
        return self._loss(
            outputs["log_probs"],
            teacher_log_probs_BLK=batch["teacher_log_probs"],
            mask_BL=trained(batch),
            auxiliary_losses_BL=outputs.get("auxiliary_losses"),
        )
