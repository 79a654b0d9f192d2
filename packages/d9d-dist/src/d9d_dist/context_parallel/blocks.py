"""Blockwise attention: each block covers some of the keys; the log-sum-exp of each block makes the merge exact.

Attention over all keys is the sum of the blocks' outputs weighted by exp(log-sum-exp of the block - log-sum-exp of all
blocks), as in Ring Attention (arXiv:2310.01889) and FlashAttention (arXiv:2205.14135). Besides its own inputs, the
backward of a block needs only the merged output, its gradient and the merged log-sum-exp.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Queries [B, H, L, K], keys and values [B, G, S, K], and mask of one block.

    Attributes:
        causal: True if query i sees only keys up to i, which requires L = S; False if every query sees all keys.
        query_documents: Document ids of the queries [B, L]; `None` if there is no document mask.
        key_documents: Document ids of the keys [B, S]; `None` if there is no document mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None


class BlockKernel(Protocol):
    """Kernel for one block of attention, with the scale 1/sqrt(K). No collectives."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Compute attention to the keys of a block.

        Returns:
            The output [B, H, L, K], and the log-sum-exp [B, H, L] of the scaled scores, in at least float32. A query
            that sees no key has output 0 and log-sum-exp -inf.
        """
        ...

    def backward(
        self, block: AttentionBlock, *, grad_BHLK: Tensor, out_BHLK: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's contributions to the gradients of its queries, keys and values.

        `grad_BHLK`, `out_BHLK` and `lse_BHL` (contiguous) are merged over all blocks.
        """
        ...


def has_flash_kernel(q: Tensor) -> bool:
    """Return True if torch has a flash kernel for the shape [..., K], device and dtype of these queries."""
    if q.numel() == 0:
        return False  # the CPU kernel divides by the length, so an empty row would crash the process
    if q.device.type == "cpu":
        return True
    return q.dtype in {torch.bfloat16, torch.float16} and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def default_kernel(q: Tensor, *, has_documents: bool) -> BlockKernel:
    """Return the fastest kernel that supports the input: a flash kernel of torch, or `MathKernel`."""
    if has_documents or not has_flash_kernel(q):
        return MathKernel()
    return CpuFlashKernel() if q.device.type == "cpu" else FlashKernel()


@final
class CpuFlashKernel:
    """Flash kernel of torch for CPUs: any floating-point dtype and head dim, no document masks."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        assert block.query_documents is None, "this kernel does not support document masks"
        return _flash_cpu(block.q, block.k, block.v, 0.0, block.causal)

    def backward(
        self, block: AttentionBlock, *, grad_BHLK: Tensor, out_BHLK: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        return _flash_cpu_backward(grad_BHLK, block.q, block.k, block.v, out_BHLK, lse_BHL, 0.0, block.causal)


@final
class FlashKernel:
    """PyTorch's flash attention kernel for accelerators.

    Requires bfloat16 or float16, and a head dim that is divisible by 8 and at most 256; no document mask.
    """

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        assert block.query_documents is None, "this kernel does not support document masks"
        out_BHLK, lse_BHL, *_ = _flash(block.q, block.k, block.v, 0.0, block.causal)
        return out_BHLK, lse_BHL

    def backward(
        self, block: AttentionBlock, *, grad_BHLK: Tensor, out_BHLK: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        inputs = (grad_BHLK, block.q, block.k, block.v, out_BHLK, lse_BHL)
        # None: all rows have equal lengths. Without dropout the generator state is unused.
        lengths = (None, None, block.q.shape[2], block.k.shape[2])
        state = torch.empty(0, dtype=torch.int64, device=block.q.device)
        return _flash_backward(*inputs, *lengths, 0.0, block.causal, state, state)


@final
class MathKernel:
    """Unfused kernel in at least float32: any device, dtype and document mask. Materializes the scores of a block."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        _, _, v_BG1SK = _grouped(block)
        scores_BGNLS = _scores(block)
        lse_BGNL1 = scores_BGNLS.logsumexp(dim=-1, keepdim=True)
        # For a query that sees no key, -inf - (-inf) would be NaN.
        weights_BGNLS = (scores_BGNLS - lse_BGNL1.masked_fill(lse_BGNL1 == -torch.inf, 0.0)).exp()
        out_BHLK = (weights_BGNLS @ v_BG1SK).flatten(1, 2)
        return out_BHLK.to(block.q.dtype), lse_BGNL1.squeeze(-1).flatten(1, 2)

    def backward(
        self, block: AttentionBlock, *, grad_BHLK: Tensor, out_BHLK: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        q_BGNLK, k_BG1SK, v_BG1SK = _grouped(block)
        by_group = (block.k.shape[1], -1)
        grad_BGNLK = grad_BHLK.to(q_BGNLK.dtype).unflatten(1, by_group)
        weights_BGNLS = (_scores(block) - lse_BHL.unflatten(1, by_group).unsqueeze(-1)).exp()
        row_BGNL1 = (out_BHLK.unflatten(1, by_group) * grad_BGNLK).sum(dim=-1, keepdim=True)
        grad_scores_BGNLS = weights_BGNLS * (grad_BGNLK @ v_BG1SK.mT - row_BGNL1) * block.q.shape[-1] ** -0.5
        grad_q_BHLK = (grad_scores_BGNLS @ k_BG1SK).flatten(1, 2)
        grad_k_BGSK = (grad_scores_BGNLS.mT @ q_BGNLK).sum(dim=2)
        grad_v_BGSK = (weights_BGNLS.mT @ grad_BGNLK).sum(dim=2)
        return grad_q_BHLK.to(block.q.dtype), grad_k_BGSK.to(block.k.dtype), grad_v_BGSK.to(block.v.dtype)


@final
class MergedBlocks:
    """Output and log-sum-exp of queries, merged over all blocks so far.

    Args:
        out_BHLK: Output of the first block, in which each query sees at least one key.
        lse_BHL: Log-sum-exp of the first block. Outputs are merged in its dtype.
    """

    def __init__(self, out_BHLK: Tensor, lse_BHL: Tensor) -> None:
        # Copies, because `add` is in place.
        self.out_BHLK = out_BHLK.to(lse_BHL.dtype, copy=True)
        self.lse_BHL = lse_BHL.clone()

    def add(self, out_BHLK: Tensor, lse_BHL: Tensor, *, queries: slice) -> None:
        """Merge the output and log-sum-exp of another block, for a slice of the queries."""
        all_lse_BHL = self.lse_BHL[:, :, queries]
        share_BHL1 = torch.sigmoid(lse_BHL - all_lse_BHL).unsqueeze(-1)
        self.out_BHLK[:, :, queries].lerp_(out_BHLK.to(lse_BHL.dtype), share_BHL1)
        self.lse_BHL[:, :, queries] = torch.logaddexp(all_lse_BHL, lse_BHL)


def _grouped(block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, G, H / G, L, K] and keys and values [B, G, 1, S, K], in at least float32."""
    dtype = torch.promote_types(block.q.dtype, torch.float32)
    q_BGNLK = block.q.to(dtype).unflatten(1, (block.k.shape[1], -1))
    return q_BGNLK, block.k.to(dtype).unsqueeze(2), block.v.to(dtype).unsqueeze(2)


def _scores(block: AttentionBlock) -> Tensor:
    """Return the scaled scores [B, G, H / G, L, S], -inf where a query does not see a key."""
    q_BGNLK, k_BG1SK, _ = _grouped(block)
    scores_BGNLS = q_BGNLK @ k_BG1SK.mT * block.q.shape[-1] ** -0.5
    if block.causal:
        future_LS = torch.ones(scores_BGNLS.shape[-2:], dtype=torch.bool, device=scores_BGNLS.device).triu(1)
        scores_BGNLS.masked_fill_(future_LS, -torch.inf)
    if block.query_documents is not None and block.key_documents is not None:
        other_BLS = block.query_documents[:, :, None] != block.key_documents[:, None, :]
        scores_BGNLS.masked_fill_(other_BLS[:, None, None], -torch.inf)
    return scores_BGNLS
