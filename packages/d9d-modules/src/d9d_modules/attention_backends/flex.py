"""Attention with FlexAttention: supports windows, masks, packed documents, softcap and sinks, skipping masked blocks.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim, I query blocks, J key
blocks.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Unpack, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from d9d_modules.attention_backends.backend import AttentionFeatures, AttentionRequest

BLOCK = 128
"""Number of positions in a block, the unit that the kernel computes or skips."""

SMALLEST_HEAD_DIM = 16
"""Smallest head dim of the compiled kernel: the tile size of the matrix units."""


@final
class FlexBackend:
    """`torch.nn.attention.flex_attention`, compiled on accelerators (arXiv:2412.05496).

    On the CPU torch implements no backward, and the forward materializes all scores.
    """

    name = "flex"

    def rejection(self, request: AttentionRequest) -> str | None:
        """See `AttentionBackend`."""
        if not _is_compiled_for(request.device):
            return f"has no backward on {request.device.type}" if request.needs_gradient else None
        if request.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
            return f"does not support {request.dtype} on {request.device.type}"
        if request.head_dim < SMALLEST_HEAD_DIM:
            return f"needs a head dim of at least {SMALLEST_HEAD_DIM}, not {request.head_dim}"
        return None

    def is_fast(self, request: AttentionRequest) -> bool:
        """See `AttentionBackend`."""
        return _is_compiled_for(request.device)

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""
        options, sinks_H = features["options"], features["sinks_H"]
        q_BHLK, k_BGSK, v_BGSK = q_BLHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
        if not _is_compiled_for(q_BLHK.device):
            # On the CPU, FlexAttention has no backward: it rejects tensors that require a gradient even in `no_grad`.
            q_BHLK, k_BGSK, v_BGSK = q_BHLK.detach(), k_BGSK.detach(), v_BGSK.detach()
        out_BHLK, aux = _kernel(q_BLHK.device)(
            q_BHLK,
            k_BGSK,
            v_BGSK,
            score_mod=None if options.softcap is None else _capped(options.softcap),
            block_mask=_block_mask_of_batch(
                q_BLHK.shape[1],
                k_BSGK.shape[1],
                is_causal=options.is_causal,
                window=options.window,
                documents_BS=features["documents_BS"],
                mask_BLS=features.get("mask_BLS"),
                device=q_BLHK.device,
            ),
            scale=options.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=sinks_H is not None),
        )
        if sinks_H is not None:
            # Exact: a sink is one more key whose value is zero, so it only scales the output.
            sinks_H1 = sinks_H.to(aux.lse.dtype).unsqueeze(-1)
            out_BHLK = (out_BHLK * torch.sigmoid(aux.lse - sinks_H1).unsqueeze(-1)).to(q_BLHK.dtype)
        return out_BHLK.transpose(1, 2)


def block_mask(
    length: int,
    key_length: int,
    *,
    is_causal: bool = True,
    window: int | None,
    documents_BS: Tensor | None,
    mask_BLS: Tensor | None = None,
    device: torch.device,
) -> BlockMask:
    """Build the block mask from block boundaries, without a host-device synchronization.

    Allocates [L, S] tensors only for `mask_BLS`.

    A block pair is skipped if causality, the window or `mask_BLS` masks it completely, or if the document-id ranges of
    queries and keys are disjoint. Within the remaining partial blocks the kernel evaluates the mask per position.
    """
    before = key_length - length

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + before
        seen = key <= place if is_causal else key >= 0
        if window is not None:
            seen = seen & (place - key < window) & (key - place < window)
        if documents_BS is not None:
            seen = seen & (documents_BS[batch, place] == documents_BS[batch, key])
        if mask_BLS is not None:
            seen = seen & mask_BLS[batch if len(mask_BLS) > 1 else 0, query, key]
        return seen

    # As in torch, blocks that extend beyond the sequence are never full blocks.
    first_query_I1 = torch.arange(before, key_length, BLOCK, device=device).unsqueeze(-1)
    last_query_I1 = first_query_I1 + (BLOCK - 1)
    first_key_J = torch.arange(0, key_length, BLOCK, device=device)
    last_key_J = first_key_J + (BLOCK - 1)
    all_IJ = (last_key_J < key_length) & (last_query_I1 < key_length)
    some_IJ = torch.ones_like(all_IJ)
    if is_causal:
        some_IJ = first_key_J <= last_query_I1
        all_IJ = all_IJ & (last_key_J <= first_query_I1)
    if window is not None:
        some_IJ = some_IJ & (first_query_I1 - last_key_J < window) & (first_key_J - last_query_I1 < window)
        all_IJ = all_IJ & (last_query_I1 - first_key_J < window) & (last_key_J - first_query_I1 < window)
    some_BIJ, all_BIJ = some_IJ.unsqueeze(0), all_IJ.unsqueeze(0)
    if mask_BLS is not None:
        some_BIJ = some_BIJ & _block_maxima(mask_BLS, padding=False)
        all_BIJ = all_BIJ & ~_block_maxima(~mask_BLS, padding=True)
    if documents_BS is not None:
        query_low_BI1, query_high_BI1 = (x.unsqueeze(-1) for x in _block_ranges(documents_BS[:, before:]))
        key_low_B1J, key_high_B1J = (x.unsqueeze(-2) for x in _block_ranges(documents_BS))
        some_BIJ = some_BIJ & (query_low_BI1 <= key_high_B1J) & (key_low_B1J <= query_high_BI1)
        all_BIJ = all_BIJ & (query_low_BI1 == key_high_B1J) & (key_low_B1J == query_high_BI1)
    return BlockMask.from_kv_blocks(
        *_listed(some_BIJ & ~all_BIJ),
        *_listed(all_BIJ),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, key_length),
    )


@lru_cache(maxsize=2)
def _shared_mask(length: int, key_length: int, *, versions: tuple[int, ...], **arguments: Any) -> BlockMask:
    """Return `block_mask` of the arguments, cached so that all layers of a batch share the masks.

    The cache holds two masks, because models alternate between layers with and without a window. The cache key has the
    tensor objects and their version counters, which change with each in-place operation.
    """
    return block_mask(length, key_length, **arguments)


def _block_mask_of_batch(length: int, key_length: int, **arguments: Any) -> BlockMask:
    tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
    if torch.compiler.is_compiling() or any(each.is_inference() for each in tensors):
        return block_mask(length, key_length, **arguments)  # inference tensors have no version
    return _shared_mask(length, key_length, versions=tuple(each._version for each in tensors), **arguments)


def _block_maxima(mask_BLS: Tensor, *, padding: bool) -> Tensor:
    """Return a mask [B, I, J]: True for pairs of blocks with a True element; elements beyond the rows are `padding`."""
    missing = [-size % BLOCK for size in mask_BLS.shape[1:]]
    padded = F.pad(mask_BLS, (0, missing[1], 0, missing[0]), value=padding)
    return padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).any(dim=4).any(dim=2)


def _block_ranges(document_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest document id of each block, both [B, I]."""
    missing = -document_ids_BL.shape[1] % BLOCK
    blocks = torch.cat((document_ids_BL, document_ids_BL[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, BLOCK))
    return blocks.amin(dim=-1), blocks.amax(dim=-1)


def _listed(blocks_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true key blocks per query block [B, 1, I], and block indices [B, 1, I, J], true first."""
    indices_BIJ = blocks_BIJ.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks_BIJ.sum(dim=-1, dtype=torch.int32).unsqueeze(1), indices_BIJ.to(torch.int32).unsqueeze(1)


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _is_compiled_for(device: torch.device) -> bool:
    return device.type not in {"cpu", "meta"}


def _kernel(device: torch.device) -> Callable[..., tuple[Tensor, Any]]:
    # Inside a compiled region, the outer torch.compile compiles flex_attention.
    return _compiled() if _is_compiled_for(device) and not torch.compiler.is_compiling() else flex_attention


@cache
def _compiled() -> Callable[..., tuple[Tensor, Any]]:
    compiled: Any = torch.compile(flex_attention)
    return compiled
