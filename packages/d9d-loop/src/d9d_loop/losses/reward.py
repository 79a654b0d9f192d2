"""Loss of reward models on preference pairs.

Shape legend: B rows, L positions of this rank, N documents of a row, P = N // 2 pairs of a row.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_loop.losses.document_sums import num_replicas, sum_per_document, take_pairs
from d9d_loop.task import Loss


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLoss:
    r"""Bradley-Terry loss of a reward model: $-\log \sigma(r(y_w) - r(y_l) - m)$ plus $c (r(y_w) + r(y_l))^2$.

    "Training language models to follow instructions", arXiv:2203.02155, equation 1. The second term centers the rewards
    ("Helping or Herding?", arXiv:2312.09244, equation 2).

    Attributes:
        centering: Coefficient $c$; 0.01 is common.
        margin: Margin $m$ ("Llama 2", arXiv:2307.09288, equation 2).

    Raises:
        UserError: If `centering` is negative.
    """

    centering: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.centering < 0.0:
            raise UserError(f"centering = {self.centering}; expected 0 or more, such as 0.01.")

    def __call__(
        self, scores_BL: Tensor, *, position_ids_BL: Tensor, document_ids_BL: Tensor, cp: DeviceMesh | None = None
    ) -> Loss:
        """Compute the sum over the pairs of packed rows; its weight is the number of pairs.

        The reward of an answer is the score of its last position. Documents 2p and 2p + 1 of a row are the chosen and
        the rejected answer of pair p, as in `PairStream`. Issues the collectives of two calls of `sum_per_document`.

        Args:
            scores_BL: Score of each position [B, L].
            position_ids_BL: Position within its document [B, L], from 0.
            document_ids_BL: Document id of each position [B, L].
            cp: See `sum_per_document`.
        """
        rewards_BN, lengths_BN = last_scores(
            scores_BL, position_ids_BL=position_ids_BL, document_ids_BL=document_ids_BL, cp=cp
        )
        (chosen_BP, rejected_BP), (num_chosen_BP, num_rejected_BP) = take_pairs(rewards_BN), take_pairs(lengths_BN)
        is_pair_BP = (num_chosen_BP > 0) & (num_rejected_BP > 0)
        losses_BP = -F.logsigmoid(chosen_BP - rejected_BP - self.margin)
        if self.centering:
            losses_BP = losses_BP + self.centering * (chosen_BP + rejected_BP).square()
        num_ranks = num_replicas(cp)
        return Loss((losses_BP * is_pair_BP).sum() / num_ranks, weight=is_pair_BP.sum() / num_ranks)


def last_scores(
    scores_BL: Tensor, *, position_ids_BL: Tensor, document_ids_BL: Tensor, cp: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """Return the score at the last position of each document [B, N], and the number of its positions [B, N]."""
    lengths_BN = sum_per_document(torch.ones_like(scores_BL), document_ids_BL, cp=cp)
    is_last_BL = position_ids_BL + 1 == lengths_BN.gather(1, document_ids_BL)
    return sum_per_document(torch.where(is_last_BL, scores_BL, 0.0), document_ids_BL, cp=cp), lengths_BN
