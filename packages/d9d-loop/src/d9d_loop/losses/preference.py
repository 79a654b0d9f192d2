"""Losses of preference pairs: DPO, conservative DPO, SimPO, IPO and SLiC as options of one formula, and reward models.

Shape legend: B rows, L positions of this rank, N documents of a row, P = N // 2 pairs of a row.
"""

from dataclasses import dataclass
from typing import assert_never, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_dist.errors import check_choice
from d9d_loop.losses.checks import check_finite, check_shapes
from d9d_loop.losses.document_sums import check_ids, num_replicas, sum_per_document, take_pairs
from d9d_loop.preference_kind import PreferenceKind
from d9d_loop.task import Loss


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    r"""Loss of pairs of a chosen and a rejected answer.

    The score of an answer is $s(y) = \sum_t \log \pi(y_t) - \log \pi_\text{ref}(y_t)$, divided by its number of tokens
    if `length_normalized`. With the margin $h = s(y_w) - s(y_l)$, the loss of a pair is:

    - `sigmoid`: $-(1 - \varepsilon) \log \sigma(\beta h - \gamma) - \varepsilon \log \sigma(\gamma - \beta h)$. DPO
      (arXiv:2305.18290, equation 7); with $\varepsilon > 0$ conservative DPO, for labels that are wrong with
      probability $\varepsilon$. Length-normalized, without a reference and with $\gamma > 0$ it is SimPO
      (arXiv:2405.14734, equation 6).
    - `squared`: $(h - \frac{1}{2 \beta})^2$. IPO (arXiv:2310.12036, equation 17), which its authors length-normalize.
    - `hinge`: $\max(0, 1 - \beta h)$. SLiC (arXiv:2305.10425, section 2.3) on the scores of DPO, as in RSO
      (arXiv:2309.06657).

    `answer_weight` $\alpha$ adds the mean negative log-likelihood of the chosen answer, $-\frac{\alpha}{|y_w|} \sum_t
    \log \pi(y_{w,t})$ ("Iterative Reasoning Preference Optimization", arXiv:2404.19733, equation 2).

    Attributes:
        beta: Strength $\beta$ of the preference; smaller values let the policy move further from the reference.
        label_smoothing: Probability $\varepsilon$ that a label is wrong, from 0 to below 0.5; only for `sigmoid`.
        target_margin: Margin $\gamma$ to reach; only for `sigmoid`.

    Raises:
        UserError: If a value is unknown or out of range, or is set but not used by `kind`.
    """

    beta: float = 0.1
    kind: PreferenceKind = "sigmoid"
    length_normalized: bool = False
    label_smoothing: float = 0.0
    target_margin: float = 0.0
    answer_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, PreferenceKind)
        check_finite(beta=self.beta, target_margin=self.target_margin, answer_weight=self.answer_weight)
        if self.beta <= 0.0:
            raise UserError(f"beta = {self.beta}; expected a number above 0, such as 0.1.")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"label_smoothing = {self.label_smoothing}; expected the probability that a label is wrong, from 0 to "
                "below 0.5."
            )
        if self.answer_weight < 0.0:
            raise UserError(f"answer_weight = {self.answer_weight}; expected 0 or more.")
        for name in ("label_smoothing", "target_margin"):
            if self.kind != "sigmoid" and getattr(self, name):
                raise UserError(f"{name} is set, but the kind {self.kind!r} does not use it; remove it.")

    def __call__(
        self,
        log_probs_BL: Tensor,
        *,
        reference_log_probs_BL: Tensor | None,
        mask_BL: Tensor,
        document_ids_BL: Tensor,
        auxiliary_losses_BL: Tensor | None = None,
        cp: DeviceMesh | None = None,
    ) -> Loss:
        """Compute the sum over the pairs of packed rows; its weight is the number of pairs.

        Documents 2p and 2p + 1 of a row are the chosen and the rejected answer of pair p, as in `PairStream`. A pair
        counts if both answers have tokens in the mask. Issues the collectives of at most four calls of
        `sum_per_document`.

        Args:
            log_probs_BL: Log-probability of each label under the policy [B, L].
            reference_log_probs_BL: The same under the reference model, without gradient; None for no reference.
            mask_BL: Positions of the answers [B, L], which contribute to the loss, bool.
            document_ids_BL: Document id of each position [B, L].
            auxiliary_losses_BL: Router losses of each position [B, L]. Each pair adds their mean over its tokens in the
                mask.
            cp: See `sum_per_document`.
        """
        margins_BP, is_pair_BP, lengths_BN = self._compare(
            log_probs_BL, reference_log_probs_BL, mask_BL, document_ids_BL, cp
        )
        losses_BP = self._losses(margins_BP)
        if self.answer_weight:
            trained_BL = torch.where(mask_BL, log_probs_BL, 0.0)
            chosen_BP, _ = take_pairs(sum_per_document(trained_BL, document_ids_BL, cp=cp))
            losses_BP = losses_BP - self.answer_weight * chosen_BP / take_pairs(lengths_BN)[0].clamp(min=1.0)
        if auxiliary_losses_BL is not None:
            sums_BP = _of_both(sum_per_document(auxiliary_losses_BL * mask_BL, document_ids_BL, cp=cp))
            losses_BP = losses_BP + sums_BP / _of_both(lengths_BN).clamp(min=1.0)
        num_ranks = num_replicas(cp)
        return Loss((losses_BP * is_pair_BP).sum() / num_ranks, weight=is_pair_BP.sum() / num_ranks)

    def margins(
        self,
        log_probs_BL: Tensor,
        *,
        reference_log_probs_BL: Tensor | None,
        mask_BL: Tensor,
        document_ids_BL: Tensor,
        cp: DeviceMesh | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the margin h of each pair [B, P], and a mask [B, P] of pairs that count. Arguments as in `__call__`.

        The reward margin that DPO reports is `beta * h`, per token if `length_normalized`; its accuracy is the share of
        pairs with h above 0.
        """
        margins_BP, is_pair_BP, _ = self._compare(log_probs_BL, reference_log_probs_BL, mask_BL, document_ids_BL, cp)
        return margins_BP, is_pair_BP

    def _compare(
        self,
        log_probs_BL: Tensor,
        reference_log_probs_BL: Tensor | None,
        mask_BL: Tensor,
        document_ids_BL: Tensor,
        cp: DeviceMesh | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values of `margins`, and the number of each document's tokens in the mask [B, N]."""
        check_shapes(log_probs_BL, reference_log_probs_BL=reference_log_probs_BL, mask_BL=mask_BL)
        ratios_BL = log_probs_BL if reference_log_probs_BL is None else log_probs_BL - reference_log_probs_BL.detach()
        # torch.where instead of a product, because a log-probability outside the mask may be infinite.
        scores_BN = sum_per_document(torch.where(mask_BL, ratios_BL, 0.0), document_ids_BL, cp=cp)
        lengths_BN = sum_per_document(mask_BL.to(log_probs_BL.dtype), document_ids_BL, cp=cp)
        if self.length_normalized:
            scores_BN = scores_BN / lengths_BN.clamp(min=1.0)
        chosen_BP, rejected_BP = take_pairs(scores_BN)
        num_chosen_BP, num_rejected_BP = take_pairs(lengths_BN)
        is_pair_BP = (num_chosen_BP > 0) & (num_rejected_BP > 0)
        return torch.where(is_pair_BP, chosen_BP - rejected_BP, 0.0), is_pair_BP, lengths_BN

    def _losses(self, margins_BP: Tensor) -> Tensor:
        match self.kind:
            case "sigmoid":
                logits_BP, smoothing = self.beta * margins_BP - self.target_margin, self.label_smoothing
                return -(1.0 - smoothing) * F.logsigmoid(logits_BP) - smoothing * F.logsigmoid(-logits_BP)
            case "squared":
                return (margins_BP - 1.0 / (2.0 * self.beta)).square()
            case "hinge":
                return F.relu(1.0 - self.beta * margins_BP)
            case _:
                assert_never(self.kind)


_NO_POSITION = -(1 << 31)


def _of_both(values_BN: Tensor) -> Tensor:
    """Return, for each pair [B, P], the summed values of its two documents."""
    chosen_BP, rejected_BP = take_pairs(values_BN)
    return chosen_BP + rejected_BP


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLoss:
    r"""Bradley-Terry loss of a reward model: $-\log \sigma(r(y_w) - r(y_l) - m)$ plus $c (r(y_w) + r(y_l))^2$.

    "Training language models to follow instructions", arXiv:2203.02155, equation 1. The second term centers the rewards
    ("Helping or Herding?", arXiv:2312.09244, equation 2).

    Attributes:
        centering: Coefficient $c$; 0.01 is common.
        margin: Margin $m$ ("Llama 2", arXiv:2307.09288, equation 2), to which a pair may add its own.

    Raises:
        UserError: If `centering` is negative, or a value is not finite.
    """

    centering: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        check_finite(centering=self.centering, margin=self.margin)
        if self.centering < 0.0:
            raise UserError(f"centering = {self.centering}; expected 0 or more, such as 0.01.")

    def __call__(
        self,
        scores_BL: Tensor,
        *,
        position_ids_BL: Tensor,
        document_ids_BL: Tensor,
        margins_BL: Tensor | None = None,
        cp: DeviceMesh | None = None,
    ) -> Loss:
        """Compute the sum over the pairs of packed rows; its weight is the number of pairs.

        The reward of an answer is the score of its last position. Documents 2p and 2p + 1 of a row are the chosen and
        the rejected answer of pair p, as in `PairStream`. Collectives with `cp`: one all-reduce of maxima, and those of
        a call of `sum_per_document`; `margins_BL` doubles them.

        Args:
            scores_BL: Score of each position [B, L].
            position_ids_BL: Position [B, L], int64, ascending within each document; it may restart in each document or
                count over the row.
            document_ids_BL: Document id of each position [B, L].
            margins_BL: Margin of the pair of each position [B, L], in addition to `margin`; None for 0.
            cp: See `sum_per_document`.
        """
        rewards_BN, has_tokens_BN = last_scores(
            scores_BL, position_ids_BL=position_ids_BL, document_ids_BL=document_ids_BL, cp=cp
        )
        (chosen_BP, rejected_BP), (has_chosen_BP, has_rejected_BP) = take_pairs(rewards_BN), take_pairs(has_tokens_BN)
        is_pair_BP = has_chosen_BP & has_rejected_BP
        # torch.where instead of a product, because scores of other documents, such as padding, may be infinite.
        chosen_BP, rejected_BP = (torch.where(is_pair_BP, each, 0.0) for each in (chosen_BP, rejected_BP))
        margin_BP: Tensor | float = self.margin
        if margins_BL is not None:
            of_pairs_BN, _ = last_scores(
                margins_BL, position_ids_BL=position_ids_BL, document_ids_BL=document_ids_BL, cp=cp
            )
            margin_BP = self.margin + take_pairs(of_pairs_BN)[0]
        losses_BP = -F.logsigmoid(chosen_BP - rejected_BP - margin_BP)
        if self.centering:
            losses_BP = losses_BP + self.centering * (chosen_BP + rejected_BP).square()
        num_ranks = num_replicas(cp)
        return Loss((losses_BP * is_pair_BP).sum() / num_ranks, weight=is_pair_BP.sum() / num_ranks)


def last_scores(
    scores_BL: Tensor, *, position_ids_BL: Tensor, document_ids_BL: Tensor, cp: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """Return the score at the last position of each document [B, N], and a mask [B, N] of documents with positions."""
    check_shapes(scores_BL, document_ids_BL=document_ids_BL)
    position_ids_BL = position_ids_BL.expand_as(scores_BL)
    num_documents = scores_BL.shape[1] * num_replicas(cp)
    check_ids(document_ids_BL, num_documents)
    last_BN = position_ids_BL.new_full((len(scores_BL), num_documents), _NO_POSITION)
    last_BN.scatter_reduce_(1, document_ids_BL, position_ids_BL, "amax")
    if cp is not None and cp.size() > 1:
        dist.all_reduce(last_BN, op=dist.ReduceOp.MAX, group=cp.get_group())
    is_last_BL = position_ids_BL == last_BN.gather(1, document_ids_BL)
    if scores_BL.device.type == "cpu":
        _check_ascending(is_last_BL, document_ids_BL, last_BN > _NO_POSITION)
    rewards_BN = sum_per_document(torch.where(is_last_BL, scores_BL, 0.0), document_ids_BL, cp=cp)
    return rewards_BN, last_BN > _NO_POSITION


def _check_ascending(is_last_BL: Tensor, document_ids_BL: Tensor, has_tokens_BN: Tensor) -> None:
    """Raise `UserError` if several positions of an answer of a pair have its largest position."""
    counts_BN = torch.zeros(has_tokens_BN.shape, dtype=torch.int64)
    counts_BN.scatter_add_(1, document_ids_BL.long(), is_last_BL.long())
    (chosen_BP, rejected_BP), (has_chosen_BP, has_rejected_BP) = take_pairs(counts_BN), take_pairs(has_tokens_BN)
    if (has_chosen_BP & has_rejected_BP & (torch.maximum(chosen_BP, rejected_BP) > 1)).any():
        raise UserError(
            "several positions of a document have its largest position id; expected ascending position ids within "
            "each document. Pass torch.arange(L) for each row, or restart it in each document."
        )
