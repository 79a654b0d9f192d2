"""Importance weights for rollouts from an inference engine, whose probabilities differ from the trained model's."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import UserError
from d9d_loop.losses.document_sums import sum_per_document

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
    model before the update. They differ in kernels and precision, or because the rollout is stale. `PolicyLoss`
    multiplies its token losses by these weights ("Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", Yao et al., 2025; truncation: Ionides, "Truncated importance sampling", 2008).

    Args:
        log_probs_BL: Log-probability of each sampled token under the trained model before the update [B, L].
        rollout_log_probs_BL: The same, as reported by the inference engine.
        mask_BL: Positions of sampled tokens [B, L], bool. Other positions get the weight 1.
        document_ids_BL: Document id of each position [B, L].
        maximum: Truncation $C$.
        level: `token`, or `sequence` for the product of the ratios of an answer at each of its tokens.
        cp: See `sum_per_document`.

    Raises:
        UserError: If `maximum` is below 1.
    """
    if maximum < 1.0:
        raise UserError(f"maximum = {maximum}; expected 1 or more: below 1, on-policy tokens would be scaled down.")
    with torch.no_grad():
        ratios_BL = torch.where(mask_BL, log_probs_BL - rollout_log_probs_BL, 0.0)
        if level == "sequence":
            ratios_BL = sum_per_document(ratios_BL, document_ids_BL, cp=cp).gather(1, document_ids_BL)
        return torch.where(mask_BL, ratios_BL.exp().clamp(max=maximum), 1.0)
