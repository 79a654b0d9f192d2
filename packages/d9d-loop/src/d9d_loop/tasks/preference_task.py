"""Task of preference pairs: DPO, SimPO, IPO and SLiC."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.losses.preference import PreferenceLoss
from d9d_loop.task import Loss
from d9d_loop.tasks.packed_inputs import PackedBatch, PackedTask, mesh_of, packed_inputs, score_arguments
from d9d_metrics import Metric, WeightedMean
from d9d_pipeline import Inputs

DPO = PreferenceLoss()
"""DPO with its usual strength."""


@final
class PreferenceTask(PackedTask):
    """Preference loss of packed pairs, for a decoder whose forward takes `scores`.

    A batch has the rows of a packed `PairStream`, and `reference_log_probs` [B, L], which `Engine.score` returns in
    `Engine.reference`.

    The metrics are `reward_margin`, the mean of `beta * h`, and `reward_accuracy`, the share of pairs with a positive
    margin. Router losses of the model are added, and do not change the margins.

    Args:
        loss: Loss of a pair.
        has_reference: False for a loss without a reference, such as SimPO: batches then have no `reference_log_probs`.

    Raises:
        UserError: In `loss`, if the batch does not match `has_reference`.
    """

    weight_unit = "pairs"

    def __init__(self, loss: PreferenceLoss = DPO, *, has_reference: bool = True) -> None:
        self._loss, self._has_reference = loss, has_reference

    def inputs(self, batch: PackedBatch) -> Inputs:
        """Return the arguments of d9d's decoders, for scores."""
        return packed_inputs(batch, scores=True)

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> Loss:
        """Return the summed losses of the pairs."""
        if self._has_reference != (batch.get("reference_log_probs") is not None):
            raise UserError(
                f"the batch has {'no' if self._has_reference else 'the key'} reference_log_probs; expected it if and "
                "only if has_reference is True. Score the batch inside Engine.reference() and add the key, or pass "
                "PreferenceTask(has_reference=False) for a loss without a reference, such as SimPO."
            )
        return self._loss(**score_arguments(outputs, batch))

    def metrics(self) -> Mapping[str, Metric]:
        """Return the reward margin and accuracy."""
        return {"reward_margin": WeightedMean(), "reward_accuracy": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Add the margins of a microbatch. Issues the collectives of the margins."""
        arguments = score_arguments(outputs, batch)
        del arguments["auxiliary_losses_BL"]  # the margins do not include the auxiliary losses
        with torch.no_grad():
            margins_BP, is_pair_BP = self._loss.margins(**arguments)
        mesh = mesh_of(batch)
        count = is_pair_BP.sum() / (1 if mesh is None else mesh.size())
        share = count / is_pair_BP.sum().clamp(min=1)  # every context-parallel rank has all pairs
        metrics["reward_margin"].update((self._loss.beta * margins_BP * is_pair_BP).sum() * share, count)
        metrics["reward_accuracy"].update(((margins_BP > 0) & is_pair_BP).sum() * share, count)
