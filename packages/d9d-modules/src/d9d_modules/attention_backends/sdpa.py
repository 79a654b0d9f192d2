"""Attention with torch's scaled dot product attention, on every device.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

import itertools
import math
from typing import Any, Unpack, final

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import sdpa_attention
from d9d_dist.context_parallel.prefix_attention import prefix_attention
from d9d_modules.attention_backends.backend import AttentionFeatures, AttentionOptions, AttentionRequest
from d9d_modules.attention_backends.visibility import document_runs, visible


@final
class SdpaBackend:
    """`torch.nn.functional.scaled_dot_product_attention`.

    A window uses a mask [L, S], packed documents a mask [B, 1, L, S]. On the CPU, packed documents use one call per
    document instead, for all rows at once if they have the same document lengths. Sinks are supported only for causal
    attention without window, mask and packed documents.
    """

    name = "sdpa"

    def rejection(self, request: AttentionRequest) -> str | None:
        """See `AttentionBackend`."""
        if request.options.softcap is not None:
            return "has no softcap"
        if request.has_sinks and (_needs_mask(request) or request.has_documents or not request.options.is_causal):
            return "supports sinks only for causal attention without a window, a mask or packed documents"
        return None

    def is_fast(self, request: AttentionRequest) -> bool:
        """See `AttentionBackend`."""
        on_cpu = request.device.type == "cpu"
        has_flash = on_cpu or (
            request.dtype in {torch.bfloat16, torch.float16} and request.head_dim % 8 == 0 and request.head_dim <= 256
        )
        needs_mask = _needs_mask(request) or (request.has_documents and not on_cpu)
        return not needs_mask and (has_flash or not (request.has_prefix_keys or request.has_sinks))

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""
        options, documents_BS, sinks_H = features["options"], features["documents_BS"], features["sinks_H"]
        if sinks_H is not None:
            q_BHLK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (_scaled(q_BLHK, options), k_BSGK, v_BSGK))
            return prefix_attention(q_BHLK, k_BGSK, v_BGSK, sinks_H).transpose(1, 2)
        mask_BLS = features.get("mask_BLS")
        if mask_BLS is not None:
            return _masked(q_BLHK, k_BSGK, v_BSGK, options, documents_BS=documents_BS, mask_BLS=mask_BLS)
        if documents_BS is None:
            return _one_document(q_BLHK, k_BSGK, v_BSGK, options)
        # With one query per row, as in generation, the mask is small, so use one call for all rows.
        is_by_document = q_BLHK.shape[1] > 1 and _is_host_readable(documents_BS)
        runs = document_runs(documents_BS) if is_by_document else None
        if runs is not None:
            return _by_document(q_BLHK, k_BSGK, v_BSGK, runs, options)
        return _masked(q_BLHK, k_BSGK, v_BSGK, options, documents_BS=documents_BS)


def _needs_mask(request: AttentionRequest) -> bool:
    return request.options.window is not None or request.has_mask


def _is_host_readable(documents_BS: Tensor) -> bool:
    """Return True if the values can be read without synchronization: a CPU tensor outside of torch.compile tracing."""
    on_cpu = documents_BS.device.type == "cpu" and type(documents_BS) is Tensor
    return on_cpu and documents_BS.numel() > 0 and not torch.compiler.is_compiling()


def _masked(
    q_BLHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    options: AttentionOptions,
    *,
    documents_BS: Tensor | None = None,
    mask_BLS: Tensor | None = None,
) -> Tensor:
    mask = visible(q_BLHK, k_BSGK, options, documents_BS=documents_BS, mask_BLS=mask_BLS)
    if mask_BLS is None:  # then each query sees its own position
        return _sdpa(q_BLHK, k_BSGK, v_BSGK, attn_mask=mask, scale=options.scale)
    # Kernels differ for a query without a visible key: let it see all keys, and set its output to 0.
    sees_none_B1L1 = ~mask.any(dim=-1, keepdim=True)
    out_BLHK = _sdpa(q_BLHK, k_BSGK, v_BSGK, attn_mask=mask | sees_none_B1L1, scale=options.scale)
    return out_BLHK.masked_fill(sees_none_B1L1.transpose(1, 2), 0.0)


def _one_document(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, options: AttentionOptions) -> Tensor:
    length, key_length = q_BLHK.shape[1], k_BSGK.shape[1]
    if options.window is not None and options.window < key_length:
        return _masked(q_BLHK, k_BSGK, v_BSGK, options)
    if length not in (1, key_length) and options.is_causal:
        return sdpa_attention(_scaled(q_BLHK, options), k_BSGK, v_BSGK)
    is_causal = options.is_causal and length > 1
    return _sdpa(q_BLHK, k_BSGK, v_BSGK, is_causal=is_causal, scale=options.scale)


def _sdpa(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **arguments: Any) -> Tensor:
    q_BHLK, k_BGSK, v_BGSK = q_BLHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
    return F.scaled_dot_product_attention(q_BHLK, k_BGSK, v_BGSK, enable_gqa=True, **arguments).transpose(1, 2)


def _scaled(q_BLHK: Tensor, options: AttentionOptions) -> Tensor:
    """Scale the queries so that kernels with the fixed scale 1/sqrt(K) compute `options.scale`."""
    return q_BLHK if options.scale is None else q_BLHK * (options.scale * math.sqrt(q_BLHK.shape[-1]))


def _by_document(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, runs: list[list[int]], options: AttentionOptions
) -> Tensor:
    """Attend within each document. All rows share the calls if they have the same document lengths."""
    if len({tuple(lengths) for lengths in runs}) == 1:
        return _documents_of_rows(q_BLHK, k_BSGK, v_BSGK, runs[0], options)
    rows = zip(q_BLHK.split(1), k_BSGK.split(1), v_BSGK.split(1), runs, strict=True)
    return torch.cat([_documents_of_rows(q, k, v, lengths, options) for q, k, v, lengths in rows])


def _documents_of_rows(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, lengths: list[int], options: AttentionOptions
) -> Tensor:
    before = k_BSGK.shape[1] - q_BLHK.shape[1]
    parts = [
        _one_document(
            q_BLHK[:, max(end - size - before, 0) : end - before],
            k_BSGK[:, end - size : end],
            v_BSGK[:, end - size : end],
            options,
        )
        for end, size in zip(itertools.accumulate(lengths), lengths, strict=True)
        if end > before
    ]
    return torch.cat(parts, dim=1)
