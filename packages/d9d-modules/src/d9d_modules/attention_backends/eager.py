"""Eager attention: the reference implementation, which supports every feature.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, N = H / G, K head dim.
"""

from typing import Unpack, final

import torch
from torch import Tensor

from d9d_modules.attention_backends.backend import AttentionFeatures, AttentionRequest
from d9d_modules.attention_backends.visibility import visible


@final
class EagerBackend:
    """`softmax(q k^T * scale) v`, "Attention Is All You Need" (arXiv:1706.03762), equation 1, in at least float32.

    The scores [B, H, L, S] are materialized.
    """

    name = "eager"

    def rejection(self, request: AttentionRequest) -> str | None:
        """See `AttentionBackend`. Always None."""
        return None

    def is_fast(self, request: AttentionRequest) -> bool:
        """See `AttentionBackend`. Always False."""
        return False

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""
        options, documents_BS, sinks_H = features["options"], features["documents_BS"], features["sinks_H"]
        dtype, num_kv_heads = torch.promote_types(q_BLHK.dtype, torch.float32), k_BSGK.shape[2]
        q_BGNLK = q_BLHK.to(dtype).transpose(1, 2).unflatten(1, (num_kv_heads, -1))
        k_BG1SK = k_BSGK.to(dtype).transpose(1, 2).unsqueeze(2)
        v_BG1SK = v_BSGK.to(dtype).transpose(1, 2).unsqueeze(2)
        scale = q_BLHK.shape[-1] ** -0.5 if options.scale is None else options.scale
        scores_BGNLS = q_BGNLK @ k_BG1SK.mT * scale
        if options.softcap is not None:
            scores_BGNLS = options.softcap * torch.tanh(scores_BGNLS / options.softcap)
        seen = visible(q_BLHK, k_BSGK, options, documents_BS=documents_BS, mask_BLS=features.get("mask_BLS"))
        seen = seen if seen.dim() == 2 else seen.unsqueeze(2)
        # Not -inf, whose softmax is NaN for a query without a visible key.
        scores_BGNLS = scores_BGNLS.masked_fill(~seen, torch.finfo(dtype).min)
        if sinks_H is None:
            weights_BGNLS = scores_BGNLS.softmax(dim=-1)
        else:
            sinks_GN11 = sinks_H.to(dtype).view(num_kv_heads, -1, 1, 1)
            sinks_BGNL1 = sinks_GN11.expand(*scores_BGNLS.shape[:-1], 1)
            weights_BGNLS = torch.cat((scores_BGNLS, sinks_BGNL1), dim=-1).softmax(dim=-1)[..., :-1]
        weights_BGNLS = weights_BGNLS.masked_fill(~seen, 0.0)
        return (weights_BGNLS @ v_BG1SK).flatten(1, 2).transpose(1, 2).to(q_BLHK.dtype)
