"""Gated delta rule as a loop over positions: the reference implementation, which also suits single decoding steps.

Shape legend: B batch, L length, G query/key heads, R value heads per key head, K key dim, V value dim.
"""

import torch
from torch import Tensor

from d9d_modules._chunked_delta_rule import DeltaRuleInputs


def sequential_delta_rule(inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of `chunked_delta_rule`, computed position by position."""
    q_BLGK, k_BLGK, v_BLGRV, log_decay_BLGR, beta_BLGR, starts_BL, state_BGRKV = inputs
    decay_BLGR = log_decay_BLGR.exp()
    if starts_BL is not None:
        decay_BLGR = decay_BLGR.masked_fill(starts_BL[..., None, None], 0.0)
    read = []
    for q_BGK, k_BGK, v_BGRV, decay_BGR, beta_BGR in zip(
        *(x.unbind(1) for x in (q_BLGK, k_BLGK, v_BLGRV, decay_BLGR, beta_BLGR)), strict=True
    ):
        state_BGRKV = decay_BGR[..., None, None] * state_BGRKV
        known_BGRV = torch.einsum("bgk,bgrkv->bgrv", k_BGK, state_BGRKV)
        correction_BGRV = beta_BGR.unsqueeze(-1) * (v_BGRV - known_BGRV)
        state_BGRKV = state_BGRKV + torch.einsum("bgk,bgrv->bgrkv", k_BGK, correction_BGRV)
        read.append(torch.einsum("bgk,bgrkv->bgrv", q_BGK, state_BGRKV))
    return torch.stack(read, dim=1) if read else v_BLGRV, state_BGRKV
