"""Cross entropy of the next token, with label smoothing and z-loss.

Shape legend: T tokens, V vocabulary (this rank's shard, if it is sharded), K candidates.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist import UserError, reduce_from_axis

IGNORED_LABEL = -100
"""Label of positions to ignore: their loss is 0 and they contribute no gradient."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Per-token cross entropy with optional label smoothing and z-loss.

    The loss of a token with logits `x` is `lse - (1 - s) * x[label] - s * mean(x) + z * lse ** 2`, where
    `lse = logsumexp(x)`. `LanguageModelHead` computes it without materializing the logits of all tokens.

    Implements `TokenLoss` and `d9d_dist.HasVocabParallelForm`. Sources: label smoothing, "Rethinking the
    Inception Architecture", arXiv:1512.00567, section 7; z-loss, "PaLM", arXiv:2204.02311, section 5.

    Attributes:
        z_loss: Coefficient `z`; 0 disables it, 1e-4 is common.
        label_smoothing: Probability mass `s` spread uniformly over the vocabulary; at least 0, below 1.
        mesh: One-dimensional mesh whose ranks hold equal vocabulary shards in rank order; None for an unsharded
            vocabulary. With a mesh every rank gets the same losses and must apply the same gradient to them.

    Raises:
        UserError: If `z_loss` or `label_smoothing` is out of range.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.z_loss < 0.0:
            raise UserError(f"z_loss = {self.z_loss}; expected 0 (for none) or more, such as 1e-4.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"label_smoothing = {self.label_smoothing}; expected 0 (for none) or more, below 1.")

    def vocab_parallel(self, mesh: DeviceMesh) -> "CrossEntropy":
        """Return the same loss for a vocabulary sharded over `mesh`; with one rank, return `self`."""
        return self if mesh.size() == 1 else replace(self, mesh=mesh)

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Compute the losses [T] in nats from logits [T, V] (float32 or float64) of an unsharded vocabulary.

        Labels [T] are int64; tokens with `IGNORED_LABEL` have loss 0. Losses have the dtype of the logits.
        """
        assert self.mesh is None, "only linear_cross_entropy computes the loss of a sharded vocabulary"
        losses_T = F.cross_entropy(
            logits_TV, labels_T, reduction="none", ignore_index=IGNORED_LABEL, label_smoothing=self.label_smoothing
        )
        if self.z_loss:
            lse_T = logits_TV.logsumexp(dim=-1).masked_fill(labels_T == IGNORED_LABEL, 0.0)
            losses_T = losses_T + self.z_loss * lse_T.square()
        return losses_T


PLAIN_CROSS_ENTROPY = CrossEntropy()
"""Cross entropy without z-loss and label smoothing."""


def candidate_losses(logits_TV: Tensor, labels_TK: Tensor, *, mesh: DeviceMesh | None) -> Tensor:
    """Compute the plain cross entropy [T, K] of several candidates of each token, as for distillation.

    Candidates are int64: within the vocabulary or `IGNORED_LABEL`, which has loss 0. With `mesh`, the logits are this
    rank's vocabulary shard, candidates are global token ids, and two all-reduces are issued.
    """
    size = logits_TV.shape[-1]
    local_TK = labels_TK - (0 if mesh is None else mesh.get_local_rank() * size)
    is_own_TK = (local_TK >= 0) & (local_TK < size)
    label_TK = logits_TV.gather(-1, local_TK.masked_fill(~is_own_TK, 0)) * is_own_TK
    if mesh is None:
        lse_T1 = logits_TV.logsumexp(dim=-1, keepdim=True)
    else:
        largest_T1 = logits_TV.detach().amax(dim=-1, keepdim=True)
        dist.all_reduce(largest_T1, op=dist.ReduceOp.MAX, group=mesh.get_group())
        mass_T1 = (logits_TV - largest_T1).exp().sum(dim=-1, keepdim=True)
        sums = reduce_from_axis(torch.cat((label_TK, mass_T1), dim=-1), mesh)
        label_TK, lse_T1 = sums[:, :-1], largest_T1 + sums[:, -1:].log()
    return (lse_T1 - label_TK).masked_fill(labels_TK == IGNORED_LABEL, 0.0)
