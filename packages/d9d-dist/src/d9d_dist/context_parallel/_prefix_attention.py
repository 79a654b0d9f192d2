"""Causal attention for the last positions of a row, without the [L, S] mask that torch would need.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

from typing import Any

import torch
from torch import Tensor

from d9d_dist.context_parallel.blocks import AttentionBlock, MergedBlocks, default_kernel
from d9d_dist.gradients.first_derivative import first_derivative_only


def prefix_attention(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    """Return the attention [B, H, L, K] of the last L < S positions, causal over all S positions.

    Merges two blocks of the flash kernel. Saves the inputs, the output and the log-sum-exp for backward.
    """
    return _PrefixAttention.apply(q_BHLK, k_BGSK, v_BGSK)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
        kernel = default_kernel(q_BHLK, has_documents=False)
        before, own = _blocks(q_BHLK, k_BGSK, v_BGSK)
        merged = MergedBlocks(*kernel.forward(own))
        merged.add(*kernel.forward(before), queries=slice(None))
        out_BHLK = merged.out_BHLK.to(q_BHLK.dtype)
        ctx.save_for_backward(q_BHLK, k_BGSK, v_BGSK, out_BHLK, merged.lse_BHL)
        return out_BHLK

    @staticmethod
    @first_derivative_only("attention with context parallelism")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHLK, k_BGSK, v_BGSK, out_BHLK, lse_BHL = ctx.saved_tensors
        kernel = default_kernel(q_BHLK, has_documents=False)
        (grad_q_before, *grads_before), (grad_q_own, *grads_own) = (
            kernel.backward(block, grad_BHLK=gradients[0], out_BHLK=out_BHLK, lse_BHL=lse_BHL)
            for block in _blocks(q_BHLK, k_BGSK, v_BGSK)
        )
        grad_k, grad_v = (torch.cat(parts, dim=2) for parts in zip(grads_before, grads_own, strict=True))
        return grad_q_before + grad_q_own, grad_k, grad_v


def _blocks(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> tuple[AttentionBlock, AttentionBlock]:
    """Return two blocks: one with the keys before the queries' positions, one with the keys at these positions."""
    before = k_BGSK.shape[2] - q_BHLK.shape[2]
    return (
        AttentionBlock(q_BHLK, k_BGSK[:, :, :before], v_BGSK[:, :, :before], causal=False),
        AttentionBlock(q_BHLK, k_BGSK[:, :, before:], v_BGSK[:, :, before:], causal=True),
    )
