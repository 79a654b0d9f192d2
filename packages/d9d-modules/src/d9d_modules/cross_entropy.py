"""What a language model is trained on: the cross entropy of the next token, with the two terms that stabilise it.

Shape legend: T tokens, V vocabulary (of this rank, where it is shared out).
"""

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist.errors import UserError

IGNORED_LABEL = -100
"""A position with this label has loss 0 and gives no gradient."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """`lse - (1 - s) * x[label] - s * mean(x) + z * lse ** 2` for the logits `x` of a token, with `lse = logsumexp(x)`.

    A `d9d_dist.TokenLoss`, with a form over ranks (`d9d_dist.HasVocabParallelForm`). The language-model head knows it
    and computes it without ever holding all logits. Label smoothing is that of "Rethinking the Inception Architecture",
    arXiv:1512.00567, section 7; the z-loss, which keeps `lse` near 0, that of "PaLM", arXiv:2204.02311, section 5.

    Attributes:
        z_loss: The factor `z`; 0 for none, 1e-4 is usual.
        label_smoothing: The part `s` of each label that is spread evenly over the vocabulary; at least 0, below 1.
        mesh: A mesh of one axis whose ranks each hold an equal part of the vocabulary, in the order of the ranks; None
            where every rank has all of it. On it, losses are equal on all ranks, which are to use them equally.

    Raises:
        UserError: If a number is out of its range.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if self.z_loss < 0.0:
            raise UserError(f"z_loss = {self.z_loss}; expected 0 (for none) or more, such as 1e-4.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"label_smoothing = {self.label_smoothing}; expected 0 (for none) or more, below 1.")

    def vocab_parallel(self, mesh: DeviceMesh) -> "CrossEntropy":
        """The same over a vocabulary that the ranks of a mesh share; a mesh of one rank shares nothing."""
        return self if mesh.size() == 1 else replace(self, mesh=mesh)

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """The equation itself, by torch's operators, on a vocabulary that is not shared out.

        Args:
            logits_TV: Logits [T, V], float32 or float64.
            labels_T: Token ids [T], int64; `IGNORED_LABEL` leaves a token out.

        Returns:
            Losses [T] in nats, in the dtype of the logits.
        """
        assert self.mesh is None, "over ranks it is computed by linear_cross_entropy alone"
        losses_T = F.cross_entropy(
            logits_TV, labels_T, reduction="none", ignore_index=IGNORED_LABEL, label_smoothing=self.label_smoothing
        )
        if self.z_loss:
            lse_T = logits_TV.logsumexp(dim=-1).masked_fill(labels_T == IGNORED_LABEL, 0.0)
            losses_T = losses_T + self.z_loss * lse_T.square()
        return losses_T


PLAIN_CROSS_ENTROPY = CrossEntropy()
"""The negative log-likelihood of each label, and nothing else."""
