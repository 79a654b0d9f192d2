"""Task of reward models."""

from typing import final

from torch import Tensor

from d9d_dist import UserError
from d9d_loop.losses.reward import RewardLoss
from d9d_loop.task import Loss
from d9d_loop.tasks.packed_inputs import PackedBatch, PackedTask, mesh_of
from d9d_pipeline import Inputs

BRADLEY_TERRY = RewardLoss()
"""Bradley-Terry loss without centering."""


@final
class RewardTask(PackedTask):
    """Bradley-Terry loss of packed pairs, for a model that returns a score of each position, [B, L] or [B, L, 1].

    A batch has the rows of a packed `PairStream` with `with_last_token`. The reward of an answer is the score of its
    last position.

    Args:
        loss: Loss of a pair.
    """

    weight_unit = "pairs"

    def __init__(self, loss: RewardLoss = BRADLEY_TERRY) -> None:
        self._loss = loss

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, without labels."""
        return Inputs(batch["input_ids"], position_ids=batch["position_ids"], document_ids_BL=batch["documents"])

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Loss:
        """Return the summed losses of the pairs. Raise `UserError` if the outputs are not scores of positions."""
        expected = batch["input_ids"].shape
        if outputs.shape not in {expected, (*expected, 1)}:
            raise UserError(
                f"the model returned scores of shape {tuple(outputs.shape)}; expected {tuple(expected)}, one score "
                "for each position."
            )
        return self._loss(
            outputs.view(expected),
            position_ids_BL=batch["position_ids"],
            document_ids_BL=batch["documents"],
            cp=mesh_of(batch),
        )
