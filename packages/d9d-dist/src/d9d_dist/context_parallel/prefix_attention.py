"""Causal attention for the last positions of a row, without the [L, S] mask that torch would need, and with sinks.

An attention sink is one more key whose value is zero. Let `lse` be the log-sum-exp of the scores over the keys. With
the sink the softmax mass of the keys is `sigmoid(lse - sink)`, so forward multiplies the output by it. The backward of
a flash kernel takes the output and the log-sum-exp. If both include the sink, the kernel computes correct gradients.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

from typing import Any

import torch
from torch import Tensor

from d9d_dist.context_parallel.blocks import AttentionBlock, MergedBlocks, default_kernel
from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_dist.split_backward import defer_weight_grad


def prefix_attention(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Return the attention [B, H, L, K] of the last L of S positions, causal over all S positions, scaled by 1/sqrt(K).

    Merges up to two blocks of the flash kernel. Saves the inputs, the output and the log-sum-exp for backward.

    Args:
        q_BHLK: Queries of the last L positions.
        k_BGSK: Keys of all S positions.
        v_BGSK: Values of all S positions.
        sinks_H: Logit of the sink of each head. A split backward defers its gradient like a weight gradient.
    """
    slot = None
    if sinks_H is not None:
        sinks_H, slot = defer_weight_grad(sinks_H, q_BHLK, k_BGSK, v_BGSK)
    return _PrefixAttention.apply(q_BHLK, k_BGSK, v_BGSK, sinks_H, slot)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *sinks: Any) -> Tensor:
        sinks_H, ctx.slot = sinks
        kernel = default_kernel(q_BHLK, has_documents=False)
        own, *before = _blocks(q_BHLK, k_BGSK, v_BGSK)
        merged = MergedBlocks(*kernel.forward(own))
        for block in before:
            merged.add(*kernel.forward(block), queries=slice(None))
        out_BHLK, lse_BHL = merged.out_BHLK, merged.lse_BHL
        if sinks_H is not None:
            sinks_H1 = sinks_H.to(lse_BHL.dtype).unsqueeze(-1)
            out_BHLK *= torch.sigmoid(lse_BHL - sinks_H1).unsqueeze(-1)
            lse_BHL = torch.logaddexp(lse_BHL, sinks_H1)
        out_BHLK = out_BHLK.to(q_BHLK.dtype)
        ctx.save_for_backward(q_BHLK, k_BGSK, v_BGSK, sinks_H, out_BHLK, lse_BHL)
        return out_BHLK

    @staticmethod
    @first_derivative_only("attention with sinks or context parallelism")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BHLK, k_BGSK, v_BGSK, sinks_H, out_BHLK, lse_BHL = ctx.saved_tensors
        kernel = default_kernel(q_BHLK, has_documents=False)
        grads_q, grads_k, grads_v = zip(
            *(
                kernel.backward(block, grad_BHLK=gradients[0], out_BHLK=out_BHLK, lse_BHL=lse_BHL)
                for block in _blocks(q_BHLK, k_BGSK, v_BGSK)
            ),
            strict=True,
        )

        def sinks_gradient() -> Tensor:
            row_BHL = (gradients[0] * out_BHLK).sum(dim=-1, dtype=lse_BHL.dtype)
            weights_BHL = (sinks_H.to(lse_BHL.dtype).unsqueeze(-1) - lse_BHL).exp()
            return -(weights_BHL * row_BHL).sum(dim=(0, 2)).to(sinks_H.dtype)

        grad_k, grad_v = torch.cat(grads_k[::-1], dim=2), torch.cat(grads_v[::-1], dim=2)
        grad_sinks = None if ctx.slot is None else ctx.slot.give(sinks_gradient)
        return sum(grads_q[1:], start=grads_q[0]), grad_k, grad_v, grad_sinks, None


def _blocks(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> list[AttentionBlock]:
    """Split the keys: a causal block at the queries' positions, then a full block of earlier keys, if any."""
    before = k_BGSK.shape[2] - q_BHLK.shape[2]
    own = AttentionBlock(q_BHLK, k_BGSK[:, :, before:], v_BGSK[:, :, before:], causal=True)
    if not before:
        return [own]
    return [own, AttentionBlock(q_BHLK, k_BGSK[:, :, :before], v_BGSK[:, :, :before], causal=False)]
