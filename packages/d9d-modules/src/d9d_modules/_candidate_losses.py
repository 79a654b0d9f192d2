"""Losses of several candidates at each position, such as the most probable tokens of a teacher.

Shape legend: T tokens (t of a chunk), D hidden size, V vocabulary (this rank's shard, if it is sharded), K candidates.
lse: log-sum-exp of the logits.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_modules._chunked_token_loss import soft_cap
from d9d_modules.cross_entropy import IGNORED_LABEL

_CHUNK_LOGITS = 2**24
"""Number of logits in a chunk, 64 MiB in float32."""


def candidate_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_TK: Tensor, *, softcap: float | None, mesh: DeviceMesh | None
) -> Tensor:
    """Compute the negative log-likelihood [T, K] of each candidate, materializing the logits of one chunk of tokens.

    Candidates are int64: within the vocabulary (not checked here) or `IGNORED_LABEL`, which has loss 0. The losses have
    at least float32. Backward recomputes the logits; a split backward does not defer the weight gradient.

    With `mesh`, the weight is this rank's vocabulary shard, and candidates are global token ids. The gradient of the
    hidden states is then this rank's partial sum. Forward issues two all-reduces per chunk; backward issues none.
    """
    losses_TK: Tensor = _CandidateLosses.apply(hidden_TD, weight_VD, labels_TK, _Options(softcap, mesh))
    return losses_TK


class _Options(NamedTuple):
    softcap: float | None
    mesh: DeviceMesh | None


class _CandidateLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_TK: Tensor, options: _Options) -> Tensor:
        parts = [
            _forward_chunk(_logits(hidden_tD, weight_VD, options), labels_tK, options.mesh)
            for hidden_tD, labels_tK in _chunks(weight_VD, hidden_TD, labels_TK)
        ]
        losses_TK, lse_T = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_TD, weight_VD, labels_TK, lse_T)
        ctx.options = options
        return losses_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_TD, weight_VD, labels_TK, lse_T = ctx.saved_tensors
        softcap, mesh = ctx.options
        grad_TK = gradients[0].masked_fill(labels_TK == IGNORED_LABEL, 0.0)
        grads_hidden_tD = []
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=lse_T.dtype)
        for hidden_tD, labels_tK, lse_t, grad_tK in _chunks(weight_VD, hidden_TD, labels_TK, lse_T, grad_TK):
            x_tV = _logits(hidden_tD, weight_VD, ctx.options)
            grad_tV = (x_tV - lse_t.unsqueeze(-1)).exp_() * grad_tK.sum(dim=-1, keepdim=True)
            own_tK, is_own_tK = _own(labels_tK, x_tV.shape[-1], mesh)
            grad_tV.scatter_add_(-1, own_tK, -grad_tK * is_own_tK)
            if softcap is not None:
                grad_tV *= 1.0 - (x_tV / softcap).square()
            narrow_tV = grad_tV.to(hidden_TD.dtype)
            grads_hidden_tD.append(narrow_tV @ weight_VD)
            grad_weight_VD += narrow_tV.T @ hidden_tD
        return torch.cat(grads_hidden_tD), grad_weight_VD.to(weight_VD.dtype), None, None


def _logits(hidden_tD: Tensor, weight_VD: Tensor, options: _Options) -> Tensor:
    x_tV = F.linear(hidden_tD, weight_VD)
    return soft_cap(x_tV.to(torch.promote_types(x_tV.dtype, torch.float32)), options.softcap)


def _forward_chunk(x_tV: Tensor, labels_tK: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return the losses [t, K] and the log-sum-exp over the whole vocabulary [t]."""
    own_tK, is_own_tK = _own(labels_tK, x_tV.shape[-1], mesh)
    label_tK, lse_t = x_tV.gather(-1, own_tK) * is_own_tK, x_tV.logsumexp(dim=-1)
    if mesh is not None:
        largest_t = lse_t.clone()
        dist.all_reduce(largest_t, op=dist.ReduceOp.MAX, group=mesh.get_group())
        sums = torch.cat((label_tK, (lse_t - largest_t).exp().unsqueeze(-1)), dim=-1)
        dist.all_reduce(sums, group=mesh.get_group())
        label_tK, lse_t = sums[:, :-1], largest_t + sums[:, -1].log()
    return (lse_t.unsqueeze(-1) - label_tK).masked_fill(labels_tK == IGNORED_LABEL, 0.0), lse_t


def _own(labels_tK: Tensor, size: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return candidates relative to this rank's first token, 0 for those of other ranks; and a mask of its own."""
    local = labels_tK - (0 if mesh is None else mesh.get_local_rank() * size)
    is_own = (local >= 0) & (local < size)
    return local.masked_fill(~is_own, 0), is_own


def _chunks(weight_VD: Tensor, *per_token: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, _CHUNK_LOGITS // max(1, len(weight_VD)))
    return zip(*(tensor.split(size) for tensor in per_token), strict=True)
