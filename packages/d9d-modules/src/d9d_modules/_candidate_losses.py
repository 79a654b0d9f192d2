"""Losses of several candidates at each position, such as the most probable tokens of a teacher.

Shape legend: T tokens (t of a chunk), D hidden size, V vocabulary (this rank's shard, if it is sharded), K candidates.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import reduce_from_axis
from d9d_modules._chunked_token_loss import chunked_token_loss
from d9d_modules.cross_entropy import IGNORED_LABEL


def candidate_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_TK: Tensor, *, softcap: float | None, mesh: DeviceMesh | None
) -> Tensor:
    """Compute the negative log-likelihoods [T, K] of the candidates, materializing one chunk of logits at a time.

    Candidates are int64: within the vocabulary (not checked here) or `IGNORED_LABEL`, which has loss 0. The losses are
    in at least float32; see also `chunked_token_loss`.

    With `mesh`, the weight is this rank's vocabulary shard, and candidates are global token ids. The gradient of the
    hidden states is then this rank's partial sum. Forward and its recomputation in backward each issue two all-reduces
    per chunk.
    """
    return chunked_token_loss(hidden_TD, weight_VD, labels_TK, token_loss=partial(_losses, mesh=mesh), softcap=softcap)


def _losses(logits_tV: Tensor, labels_tK: Tensor, *, mesh: DeviceMesh | None) -> Tensor:
    size = logits_tV.shape[-1]
    local_tK = labels_tK - (0 if mesh is None else mesh.get_local_rank() * size)
    is_own_tK = (local_tK >= 0) & (local_tK < size)
    label_tK = logits_tV.gather(-1, local_tK.masked_fill(~is_own_tK, 0)) * is_own_tK
    if mesh is None:
        lse_t1 = logits_tV.logsumexp(dim=-1, keepdim=True)
    else:
        largest_t1 = logits_tV.detach().amax(dim=-1, keepdim=True)
        dist.all_reduce(largest_t1, op=dist.ReduceOp.MAX, group=mesh.get_group())
        mass_t1 = (logits_tV - largest_t1).exp().sum(dim=-1, keepdim=True)
        sums = reduce_from_axis(torch.cat((label_tK, mass_t1), dim=-1), mesh)
        label_tK, lse_t1 = sums[:, :-1], largest_t1 + sums[:, -1:].log()
    return (lse_t1 - label_tK).masked_fill(labels_tK == IGNORED_LABEL, 0.0)
