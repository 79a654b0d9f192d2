"""Policy-gradient loss of sampled answers: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, GSPO and CISPO as options.

`truncated_importance` corrects for rollouts from an inference engine, whose probabilities differ from the trained
model's. Shape legend: B rows, L positions of this rank, N documents of a row.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import UserError
from d9d_dist.errors import check_choice
from d9d_loop.losses.checks import check_finite, check_shapes
from d9d_loop.losses.document_sums import num_replicas, sum_per_document
from d9d_loop.task import Loss

KlForm: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimator of Schulman's "Approximating KL divergence" (2020): `k1` is unbiased, `k3` is unbiased and not negative."""


def kl_divergence(log_probs: Tensor, reference_log_probs: Tensor, *, form: KlForm = "k3") -> Tensor:
    r"""Estimate $KL(\pi \| \pi_\text{ref})$ at each token. With $d = \log \pi_\text{ref} - \log \pi$:

    - `k1`: $-d$
    - `k2`: $d^2 / 2$
    - `k3`: $e^d - d - 1$, the form of GRPO (arXiv:2402.03300, equation 4)

    The estimates are of the same shape as the log-probabilities of the sampled tokens. As a penalty in a loss, on
    tokens sampled from the policy, `k2` has in expectation the gradient of the reverse KL divergence. The expected
    gradient of `k1` is 0.
    """  # noqa: D415 - a list follows the first sentence
    difference = reference_log_probs - log_probs
    match form:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2.0
        case "k3":
            return difference.exp() - difference - 1.0
        case _:
            assert_never(form)


ImportanceLevel: TypeAlias = Literal["token", "sequence"]
"""Unit of an importance ratio: a token, or a whole answer."""


def truncated_importance(
    log_probs_BL: Tensor,
    rollout_log_probs_BL: Tensor,
    *,
    mask_BL: Tensor,
    document_ids_BL: Tensor,
    maximum: float = 2.0,
    level: ImportanceLevel = "token",
    cp: DeviceMesh | None = None,
) -> Tensor:
    r"""Return the truncated importance weight of each token, $\min(\pi / \mu, C)$, [B, L], without gradient.

    $\mu$ is the probability that the inference engine reported for a token; $\pi$ is its probability under the trained
    model before the update. They differ because the engine uses other kernels and another precision, or because the
    rollout is stale. `PolicyLoss` multiplies its token losses by these weights ("Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", Yao et al., 2025; truncation: Ionides, "Truncated importance sampling", 2008).

    Args:
        log_probs_BL: Log-probability of each sampled token under the trained model before the update [B, L].
        rollout_log_probs_BL: The same, as reported by the inference engine.
        mask_BL: Positions of sampled tokens [B, L], bool. Other positions get the weight 1.
        document_ids_BL: Document id of each position [B, L].
        maximum: Truncation $C$.
        level: `token`: ratio of each token. `sequence`: product of the ratios of an answer, for all its tokens.
        cp: See `sum_per_document`.

    Raises:
        UserError: If `maximum` is below 1, `level` is unknown, or the shapes differ.
    """
    check_choice("level", level, ImportanceLevel)
    check_shapes(log_probs_BL, rollout_log_probs_BL=rollout_log_probs_BL, mask_BL=mask_BL)
    if not maximum >= 1.0:
        raise UserError(f"maximum = {maximum}; expected 1 or more: below 1, on-policy tokens would be scaled down.")
    with torch.no_grad():
        ratios_BL = torch.where(mask_BL, log_probs_BL - rollout_log_probs_BL, 0.0)
        if level == "sequence":
            ratios_BL = sum_per_document(ratios_BL, document_ids_BL, cp=cp).gather(1, document_ids_BL)
        return torch.where(mask_BL, ratios_BL.exp().clamp(max=maximum), 1.0)


Clipping: TypeAlias = Literal["clip", "stop_gradient", "none"]
"""Limit of the ratio: as in PPO, as in CISPO, or none."""

Average: TypeAlias = Literal["tokens", "sequences", "constant"]
"""Unit over which the loss of a batch is averaged."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    r"""Surrogate loss of sampled tokens with advantages $A_t$.

    With the ratio $r_t = \pi(y_t) / \pi_\text{old}(y_t)$, or at the level of sequences $r_t = \left(\prod_{u \in y}
    \pi(y_u) / \pi_\text{old}(y_u)\right)^{1/|y|}$, the loss of a token is:

    - `clip`: $-\min(r_t A_t, \text{clip}(r_t, 1 - \varepsilon_l, 1 + \varepsilon_h) A_t)$ (PPO, arXiv:1707.06347,
      equation 7). `max_ratio` limits $r_t$ in the first term (dual clip, arXiv:1912.09729).
    - `stop_gradient`: $-\text{sg}(\min(r_t, 1 + \varepsilon_h)) A_t \log \pi(y_t)$ (CISPO, arXiv:2506.13585,
      equation 4).
    - `none`: $-r_t A_t$. Without old log-probabilities, it has the gradient of REINFORCE, $-A_t \nabla \log \pi(y_t)$.

    The KL penalty $\beta\, KL(\pi \| \pi_\text{ref})$ is added at each token.

    | method | ratio_level | clipping | average | advantages |
    | --- | --- | --- | --- | --- |
    | GRPO (arXiv:2402.03300) | `token` | `clip` | `sequences` | `group_mean`, `group_std` |
    | DAPO (arXiv:2503.14476) | `token` | `clip`, `clip_high` 0.28 | `tokens` | `group_mean`, `group_std` |
    | Dr. GRPO (arXiv:2503.20783) | `token` | `clip` | `constant`, longest answer | `group_mean`, `none` |
    | RLOO (arXiv:2402.14740) | `token` | `none` | `constant`, 1 | `leave_one_out`, `none` |
    | REINFORCE++ (arXiv:2501.03262) | `token` | `clip` | `tokens` | `none`, `batch_std` |
    | GSPO (arXiv:2507.18071) | `sequence` | `clip`, 3e-4, 4e-4 | `sequences` | `group_mean`, `group_std` |
    | CISPO (arXiv:2506.13585) | `token` | `stop_gradient`, `clip_high` 4 | `tokens` | `group_mean`, `group_std` |

    Attributes:
        clip_low: $\varepsilon_l$.
        clip_high: $\varepsilon_h$; None means the value of `clip_low`.
        max_ratio: Largest ratio in the unclipped term, above 1 + `clip_high`; None for no limit.
        kl_weight: Weight $\beta$ of the KL penalty.
        average: `tokens`: mean over the tokens of the global batch. `sequences`: mean over answers of the mean over
            their tokens. `constant`: sum over tokens divided by the number of answers times `max_length`.
        max_length: Divisor of `constant`: the largest number of tokens of an answer, or 1 for the sum over its tokens.
            The mean number of tokens of the answers of a generated batch, which several steps train, gives the DAPO of
            `trl` with its `steps_per_generation`.

    Raises:
        UserError: If a value is unknown or out of range, or `max_ratio` or `max_length` does not fit the other options.
    """

    ratio_level: ImportanceLevel = "token"
    clipping: Clipping = "clip"
    clip_low: float = 0.2
    clip_high: float | None = None
    max_ratio: float | None = None
    kl_weight: float = 0.0
    kl_form: KlForm = "k3"
    average: Average = "tokens"
    max_length: float | None = None

    def __post_init__(self) -> None:
        check_choice("ratio_level", self.ratio_level, ImportanceLevel)
        check_choice("clipping", self.clipping, Clipping)
        check_choice("kl_form", self.kl_form, KlForm)
        check_choice("average", self.average, Average)
        check_finite(
            clip_high=self.clip_high, max_ratio=self.max_ratio, kl_weight=self.kl_weight, max_length=self.max_length
        )
        if not 0.0 < self.clip_low <= 1.0 or self._high <= 0.0:
            raise UserError(
                f"clip_low = {self.clip_low} and clip_high = {self.clip_high}; expected both above 0, and clip_low at "
                "most 1."
            )
        if self.kl_weight < 0.0:
            raise UserError(f"kl_weight = {self.kl_weight}; expected 0 or more.")
        if self.max_ratio is not None and (self.clipping != "clip" or self.max_ratio <= 1.0 + self._high):
            raise UserError(
                f"max_ratio = {self.max_ratio} with clipping = {self.clipping!r}; expected a number above 1 + "
                f"clip_high = {1.0 + self._high}, with clipping = 'clip'."
            )
        if (self.max_length is not None) != (self.average == "constant") or (self.max_length or 1) < 1:
            raise UserError(
                f"max_length = {self.max_length} with average = {self.average!r}; expected the largest number of "
                "tokens of an answer if average = 'constant', else None."
            )

    def __call__(
        self,
        log_probs_BL: Tensor,
        *,
        advantages_BL: Tensor,
        mask_BL: Tensor,
        document_ids_BL: Tensor,
        old_log_probs_BL: Tensor | None = None,
        reference_log_probs_BL: Tensor | None = None,
        importance_BL: Tensor | None = None,
        auxiliary_losses_BL: Tensor | None = None,
        cp: DeviceMesh | None = None,
    ) -> Loss:
        """Compute the sum over the sampled tokens of packed rows, and its weight.

        Gradients flow only through `log_probs_BL` and `auxiliary_losses_BL`.

        Args:
            log_probs_BL: Log-probability of each sampled token under the policy [B, L].
            advantages_BL: Advantage of each sampled token [B, L], usually the advantage of its answer.
            mask_BL: Positions whose label was sampled [B, L], bool. Each document with such a position is an answer.
            document_ids_BL: Document id of each position [B, L].
            old_log_probs_BL: Log-probabilities under the policy before the first update on these answers. None on the
                first update, where the ratio is 1 and the gradient is that of REINFORCE.
            reference_log_probs_BL: Log-probabilities under the reference; required if and only if `kl_weight` is set.
            importance_BL: Multiplier of each token's loss, such as `truncated_importance`.
            auxiliary_losses_BL: Router losses of each token [B, L], added to its loss.
            cp: See `sum_per_document`, which is called once, or twice for ratios of sequences.

        Raises:
            UserError: If `reference_log_probs_BL` does not match `kl_weight`, or the shapes differ.
        """
        if (reference_log_probs_BL is not None) != (self.kl_weight > 0.0):
            raise UserError(
                f"kl_weight = {self.kl_weight}, and reference log-probabilities are "
                f"{'given' if reference_log_probs_BL is not None else 'missing'}; expected them if and only if "
                "kl_weight is above 0."
            )
        check_shapes(
            log_probs_BL,
            advantages_BL=advantages_BL,
            mask_BL=mask_BL,
            old_log_probs_BL=old_log_probs_BL,
            reference_log_probs_BL=reference_log_probs_BL,
            importance_BL=importance_BL,
            auxiliary_losses_BL=auxiliary_losses_BL,
        )
        log_probs_BL, advantages_BL = torch.where(mask_BL, log_probs_BL, 0.0), _constant(advantages_BL, mask_BL)
        old_BL = log_probs_BL.detach() if old_log_probs_BL is None else _constant(old_log_probs_BL, mask_BL)
        lengths_BN = sum_per_document(mask_BL.to(log_probs_BL.dtype), document_ids_BL, cp=cp)
        lengths_BL = lengths_BN.gather(1, document_ids_BL).clamp(min=1.0)
        log_ratio_BL = log_probs_BL - old_BL
        if self.ratio_level == "sequence":
            sums_BN = sum_per_document(log_ratio_BL, document_ids_BL, cp=cp)
            log_ratio_BL = sums_BN.gather(1, document_ids_BL) / lengths_BL
        losses_BL = self._losses(log_ratio_BL.exp(), log_probs_BL, advantages_BL)
        if importance_BL is not None:
            losses_BL = losses_BL * _constant(importance_BL, mask_BL)
        if reference_log_probs_BL is not None:
            reference_BL = _constant(reference_log_probs_BL, mask_BL)
            losses_BL = losses_BL + self.kl_weight * kl_divergence(log_probs_BL, reference_BL, form=self.kl_form)
        if auxiliary_losses_BL is not None:
            losses_BL = losses_BL + auxiliary_losses_BL
        losses_BL = torch.where(mask_BL, losses_BL, 0.0)
        num_answers = (lengths_BN > 0).sum() / num_replicas(cp)
        match self.average:
            case "tokens":
                return Loss(losses_BL.sum(), weight=mask_BL.sum())
            case "sequences":
                return Loss((losses_BL / lengths_BL).sum(), weight=num_answers)
            case "constant":
                assert self.max_length is not None
                return Loss(losses_BL.sum() / self.max_length, weight=num_answers)
            case _:
                assert_never(self.average)

    @property
    def _high(self) -> float:
        return self.clip_low if self.clip_high is None else self.clip_high

    def _losses(self, ratio_BL: Tensor, log_probs_BL: Tensor, advantages_BL: Tensor) -> Tensor:
        match self.clipping:
            case "clip":
                clipped_BL = ratio_BL.clamp(1.0 - self.clip_low, 1.0 + self._high)
                free_BL = ratio_BL if self.max_ratio is None else ratio_BL.clamp(max=self.max_ratio)
                return -torch.minimum(free_BL * advantages_BL, clipped_BL * advantages_BL)
            case "stop_gradient":
                return -ratio_BL.clamp(max=1.0 + self._high).detach() * advantages_BL * log_probs_BL
            case "none":
                return -ratio_BL * advantages_BL
            case _:
                assert_never(self.clipping)


def _constant(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return values without gradient, 0 outside the mask."""
    return torch.where(mask_BL, values_BL.detach(), 0.0)
