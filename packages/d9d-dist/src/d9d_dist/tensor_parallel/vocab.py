"""Token embedding and token loss over a vocabulary that is split over ranks.

Shape legend: T tokens, V vocabulary, D hidden size; V_local = V / ranks.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_dist.token_ids import check_token_ids

_IGNORED = -100  # label of tokens without a loss, as in `token_cross_entropy`

TokenLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function that maps logits [T, V] and labels [T], int64, to the negative log-likelihood of each label [T], in nats."""


@runtime_checkable
class HasTokenLoss(Protocol):
    """Module whose loss function, `token_loss`, can be replaced."""

    token_loss: TokenLoss


@runtime_checkable
class HasVocabParallelForm(Protocol):
    """`TokenLoss` with a form for a vocabulary that is split over ranks."""

    def vocab_parallel(self, mesh: DeviceMesh) -> TokenLoss:
        """Return the loss function for this rank's logits.

        The vocabulary is split evenly over the 1-D mesh, in rank order.
        """
        ...


def token_cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the negative log-likelihood [T] in nats, 0 for labels of -100. The `TokenLoss` of unsplit logits."""
    return F.cross_entropy(logits_TV, labels_T, reduction="none")


def embed_vocab_shard(ids: Tensor, num_rows: int, mesh: DeviceMesh, lookup: Callable[[Tensor], Tensor]) -> Tensor:
    """Embed this rank's ids; other ids give zeros. The sum over ranks is the embedding. No collectives.

    `ids` are int64 of any shape. `lookup` returns the vectors [..., D] of local ids: below `num_rows`, counted from
    this rank's first row. An id outside of [0, V) raises `UserError` on the CPU; on an accelerator the device raises
    later.
    """
    check_token_ids(ids, mesh.size() * num_rows, what="token ids")
    local_ids, is_here = _local_ids(ids, num_rows, mesh)
    return lookup(local_ids).masked_fill(~is_here.unsqueeze(-1), 0.0)


@final
class VocabParallelCrossEntropy:
    """Cross entropy over logits that are split over the vocabulary.

    Forward issues two all-reduces, of [T] and [2, T] elements. Backward has no collectives: every rank computes the
    gradient of its own logits, and the gradients of the losses must be equal on all ranks. Arithmetic is in the dtype
    of the logits.

    The vocabulary is split evenly over a mesh of one axis. Tokens with the label -100 have loss 0 and no gradient.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return losses [T] of this rank's logits [T, V_local] and labels [T].

        Labels must be equal on all ranks, and so are the losses.

        Raises:
            UserError: On the CPU, if a label is out of range. On an accelerator the device raises later.
        """
        vocab_size = self._mesh.size() * logits_TV.shape[-1]
        check_token_ids(labels_T, vocab_size, what="labels", ignored=_IGNORED)
        return _CrossEntropy.apply(logits_TV, labels_T, self._mesh)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group()
        largest_T = logits_TV.amax(dim=-1)
        dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV - largest_T.unsqueeze(-1)
        local_ids, is_here = _local_ids(labels_T, logits_TV.shape[-1], mesh)
        ids_T1 = local_ids.unsqueeze(-1)
        label_T = shifted_TV.gather(-1, ids_T1).squeeze(-1).masked_fill(~is_here, 0.0)
        weights_TV = shifted_TV.exp_()
        sums_2T = torch.stack((weights_TV.sum(dim=-1), label_T))
        dist.all_reduce(sums_2T, group=group)
        total_T, label_T = sums_2T.unbind()
        is_counted = labels_T != _IGNORED
        probabilities_TV = weights_TV.div_(total_T.unsqueeze(-1))
        ctx.save_for_backward(probabilities_TV, ids_T1, is_here & is_counted, is_counted)
        return (total_T.log() - label_T).masked_fill(~is_counted, 0.0)

    @staticmethod
    @first_derivative_only("the cross entropy of a sharded vocabulary")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities_TV, ids_T1, is_target, is_counted = ctx.saved_tensors
        scale_T1 = gradients[0].masked_fill(~is_counted, 0.0).unsqueeze(-1)
        gradient_TV = probabilities_TV * scale_T1
        gradient_TV.scatter_add_(-1, ids_T1, -scale_T1 * is_target.unsqueeze(-1))
        return gradient_TV, None, None


def _local_ids(ids: Tensor, num_local: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return ids relative to this rank's first id, 0 for ids of other ranks; and a mask of this rank's ids."""
    local = ids - mesh.get_local_rank() * num_local
    is_here = (local >= 0) & (local < num_local)
    return local.masked_fill(~is_here, 0), is_here
