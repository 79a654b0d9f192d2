"""Distillation of a teacher's most probable tokens into a student.

Shape legend: B rows, L positions of this rank, K candidates of a position.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.losses.checks import check_shapes
from d9d_loop.task import Loss

_LARGEST_SUM = 1.05  # log-probabilities may be rounded to bfloat16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLoss:
    r"""KL divergence from a teacher $p$ to the student $q$, over the teacher's K most probable tokens of each position.

    $\sum_k p_k (\log p_k - \log q_k)$ ("Distilling the Knowledge in a Neural Network", arXiv:1503.02531), and, with
    `with_rest`, the same term for all other tokens together: $p_r = 1 - \sum_k p_k$ and $q_r = 1 - \sum_k q_k$. Then
    the loss is a KL divergence of K + 1 outcomes: it is not negative, and 0 only if the student has the teacher's
    probabilities. Without the rest, the loss does not directly penalize the student's probability of other tokens.

    Attributes:
        normalized: If True, scale the teacher's candidates to sum to 1 first; excludes `with_rest`.

    Raises:
        UserError: If both options are set.
    """

    with_rest: bool = True
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.with_rest and self.normalized:
            raise UserError(
                "with_rest and normalized are both set, but normalized candidates have a total probability of 1, so no "
                "rest remains; set with_rest = False."
            )

    def __call__(
        self,
        log_probs_BLK: Tensor,
        *,
        teacher_log_probs_BLK: Tensor,
        mask_BL: Tensor,
        auxiliary_losses_BL: Tensor | None = None,
    ) -> Loss:
        """Compute the sum over the positions in the mask; the weight is their number. No collectives.

        Gradients flow only through `log_probs_BLK` and `auxiliary_losses_BL`.

        Args:
            log_probs_BLK: The student's log-probabilities of the candidates [B, L, K].
            teacher_log_probs_BLK: The teacher's log-probabilities of the same tokens. Slots with -inf are unused, for
                fewer than K candidates: their tokens belong to the rest.
            mask_BL: Positions [B, L] that contribute to the loss, bool.
            auxiliary_losses_BL: Router losses of each position [B, L], added to its loss.

        Raises:
            UserError: If the shapes differ. On the CPU, if the teacher's probabilities sum to more than 1.
        """
        check_shapes(log_probs_BLK, teacher_log_probs_BLK=teacher_log_probs_BLK)
        check_shapes(log_probs_BLK[..., 0], mask_BL=mask_BL, auxiliary_losses_BL=auxiliary_losses_BL)
        teacher_BLK = teacher_log_probs_BLK.detach().to(log_probs_BLK.dtype)
        if self.with_rest and mask_BL.device.type == "cpu":
            _check_probabilities(teacher_BLK, mask_BL)
        if self.normalized:
            teacher_BLK = teacher_BLK.log_softmax(dim=-1)
        is_used_BLK = teacher_BLK.exp() > 0.0
        losses_BL = _term(teacher_BLK, log_probs_BLK, is_used_BLK).sum(dim=-1)
        if self.with_rest:
            rests = (_log_rest(each, is_used_BLK) for each in (teacher_BLK, log_probs_BLK))
            losses_BL = losses_BL + _term(*rests, mask_BL)
        if auxiliary_losses_BL is not None:
            losses_BL = losses_BL + auxiliary_losses_BL
        return Loss(torch.where(mask_BL, losses_BL, 0.0).sum(), weight=mask_BL.sum())


def _term(teacher: Tensor, student: Tensor, is_used: Tensor) -> Tensor:
    """Return p (log p - log q), and 0 where it is not used."""
    teacher, student = (torch.where(is_used, each, 0.0) for each in (teacher, student))
    return torch.where(is_used, teacher.exp() * (teacher - student), 0.0)


def _log_rest(log_probs_BLK: Tensor, is_used_BLK: Tensor) -> Tensor:
    """Return the logarithm of the probability of all other tokens [B, L]. This probability is at least `eps`."""
    covered_BL = torch.where(is_used_BLK, log_probs_BLK, -torch.inf).exp().sum(dim=-1)
    smallest = torch.finfo(log_probs_BLK.dtype).eps
    return torch.log1p(-covered_BL.clamp(max=1.0 - smallest))


def _check_probabilities(teacher_BLK: Tensor, mask_BL: Tensor) -> None:
    largest = torch.where(mask_BL, teacher_BLK.float().logsumexp(dim=-1), -torch.inf).exp().max() if len(mask_BL) else 0
    if largest > _LARGEST_SUM:
        raise UserError(
            f"the teacher's probabilities of the candidates of a position sum to {float(largest):.3g}; expected at "
            "most 1. Pass log-probabilities (log_softmax of the logits) of different tokens."
        )
