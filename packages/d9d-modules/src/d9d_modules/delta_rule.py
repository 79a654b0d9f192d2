"""Gated delta rule: linear attention with a decaying state that is updated by error correction.

Shape legend: B batch, L length, G query/key heads, H value heads, R = H / G, K features of a key, V of a value.
"""

from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules._chunked_delta_rule import DeltaRuleInputs, chunked_delta_rule, sequential_delta_rule
from d9d_modules._fla_delta_rule import fla_delta_rule, why_not_fla
from d9d_modules.attention_backends.visibility import check_documents, document_starts

DeltaRuleBackend: TypeAlias = Literal["sequential", "chunked", "fla"]
"""Implementation: a loop over positions; matrix products over chunks of positions; the kernels of `fla-core`."""


def gated_delta_rule(
    q_BLGK: Tensor,
    k_BLGK: Tensor,
    v_BLHV: Tensor,
    *,
    log_decay_BLH: Tensor,
    beta_BLH: Tensor,
    document_ids_BL: Tensor | None = None,
    initial_state_BHKV: Tensor | None = None,
    scale: float | None = None,
    backend: DeltaRuleBackend | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to each head. No collectives.

    For each position: `S = alpha * S; S = S + outer(k, beta * (v - k @ S)); out = scale * q @ S`. This is "Gated Delta
    Networks" (arXiv:2412.06464), equation 10, with the state S [K, V] transposed. State and arithmetic are float32
    (float64 for float64 values); the kernels of `fla-core` multiply matrices in the dtype of the values. Memory is
    linear in the sequence length.

    Args:
        q_BLGK: Queries [B, L, G, K].
        k_BLGK: Keys [B, L, G, K] with an L2 norm of at most 1; otherwise the state may diverge.
        v_BLHV: Values [B, L, H, V]; H / G consecutive value heads share a key head.
        log_decay_BLH: Logarithm of alpha [B, L, H]: finite, at most 0.
        beta_BLH: Write strength [B, L, H], from 0 to 1.
        document_ids_BL: Document id of each position [B, L], integer; the state is reset to zeros at document starts. A
            document id that reappears after another id starts a new document. None: each row is one document.
        initial_state_BHKV: State before the first position of each row [B, H, K, V]; None for zeros.
        scale: Multiplier of the queries; None for 1/sqrt(K).
        backend: Implementation; None selects `"fla"` if it is installed and supports the call, else `"chunked"`.
        chunk_size: Positions per chunk of `"chunked"`.

    Returns:
        Output [B, L, H, V] in the dtype of `v_BLHV`, and the float32 or float64 state after the last position
        [B, H, K, V].

    Raises:
        UserError: If shapes or dtypes do not match, or the backend is unknown or does not support the call.
    """
    _check_inputs(q_BLGK, k_BLGK, v_BLHV, log_decay_BLH=log_decay_BLH, beta_BLH=beta_BLH)
    state_shape = (len(v_BLHV), v_BLHV.shape[2], k_BLGK.shape[3], v_BLHV.shape[3])
    if initial_state_BHKV is not None and initial_state_BHKV.shape != state_shape:
        raise UserError(f"got an initial state of shape {tuple(initial_state_BHKV.shape)}; expected {state_shape}.")
    check_documents(document_ids_BL, q_BLGK.shape[:2])
    if v_BLHV.is_meta:
        return _counted_on_meta(q_BLGK, k_BLGK, v_BLHV, log_decay_BLH + beta_BLH)
    scale = q_BLGK.shape[-1] ** -0.5 if scale is None else scale
    starts_BL = None if document_ids_BL is None else document_starts(document_ids_BL)
    chosen = _select_backend(backend, v_BLHV, key_dim=q_BLGK.shape[-1])
    if chosen == "fla":
        return fla_delta_rule(
            q_BLGK,
            k_BLGK,
            v_BLHV,
            log_decay_BLH=log_decay_BLH,
            beta_BLH=beta_BLH,
            starts_BL=starts_BL,
            state_BHKV=initial_state_BHKV,
            scale=scale,
        )
    rule = sequential_delta_rule if chosen == "sequential" else partial(chunked_delta_rule, chunk_size=chunk_size)
    dtype = torch.promote_types(v_BLHV.dtype, torch.float32)
    heads = (k_BLGK.shape[2], v_BLHV.shape[2] // k_BLGK.shape[2])
    if initial_state_BHKV is None:
        initial_state_BHKV = v_BLHV.new_zeros(state_shape)
    inputs = DeltaRuleInputs(
        q_BLGK.to(dtype) * scale,
        k_BLGK.to(dtype),
        v_BLHV.to(dtype).unflatten(2, heads),
        log_decay=log_decay_BLH.to(dtype).unflatten(2, heads),
        beta=beta_BLH.to(dtype).unflatten(2, heads),
        starts=starts_BL,
        state=initial_state_BHKV.to(dtype).unflatten(1, heads),
    )
    out_BLGRV, state_BGRKV = rule(inputs)
    return out_BLGRV.flatten(2, 3).to(v_BLHV.dtype), state_BGRKV.flatten(1, 2)


def _counted_on_meta(q_BLGK: Tensor, k_BLGK: Tensor, v_BLHV: Tensor, gates_BLH: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and states on `meta`, computed by the matrix products of the definition.

    FLOPs are counted on `meta`, and must not depend on the backend.
    """
    q_BLH1K, k_BLH1K = (x.repeat_interleave(v_BLHV.shape[2] // x.shape[2], 2).unsqueeze(-2) for x in (q_BLGK, k_BLGK))
    states_BLHKV = k_BLH1K.mT @ v_BLHV.unsqueeze(-2)
    read_BLHV = (k_BLH1K @ states_BLHKV + q_BLH1K @ states_BLHKV).squeeze(-2)
    return (read_BLHV + gates_BLH.unsqueeze(-1)).to(v_BLHV.dtype), states_BLHKV[:, -1]


def _select_backend(backend: DeltaRuleBackend | None, v_BLHV: Tensor, *, key_dim: int) -> DeltaRuleBackend:
    match backend:
        case "sequential" | "chunked":
            return backend
        case "fla":
            reason = why_not_fla(v_BLHV, key_dim=key_dim)
            if reason is not None:
                raise UserError(f"backend 'fla' is not available: {reason}. Use 'chunked', or None to select one.")
            return "fla"
        case None:
            # fla does not support tensor subclasses such as fake tensors.
            is_able = type(v_BLHV) is Tensor and why_not_fla(v_BLHV, key_dim=key_dim) is None
            return "fla" if is_able else "chunked"
        case _:
            raise UserError(f"backend = {backend!r}; expected 'sequential', 'chunked', 'fla', or None to select one.")


def _check_inputs(q_BLGK: Tensor, k_BLGK: Tensor, v_BLHV: Tensor, *, log_decay_BLH: Tensor, beta_BLH: Tensor) -> None:
    fits = q_BLGK.dim() == v_BLHV.dim() == 4 and q_BLGK.shape == k_BLGK.shape and q_BLGK.shape[:2] == v_BLHV.shape[:2]
    if not fits or log_decay_BLH.shape != v_BLHV.shape[:3] or beta_BLH.shape != v_BLHV.shape[:3]:
        raise UserError(
            f"got queries {tuple(q_BLGK.shape)}, keys {tuple(k_BLGK.shape)}, values {tuple(v_BLHV.shape)}, log decays "
            f"{tuple(log_decay_BLH.shape)}, betas {tuple(beta_BLH.shape)}; expected [B, L, G, K] twice, [B, L, H, V], "
            "and [B, L, H] twice."
        )
    if v_BLHV.shape[2] % q_BLGK.shape[2]:
        raise UserError(
            f"got {q_BLGK.shape[2]} key heads and {v_BLHV.shape[2]} value heads; value heads are divided evenly among "
            "key heads: use a number of key heads that divides the number of value heads."
        )
    if not q_BLGK.dtype == k_BLGK.dtype == v_BLHV.dtype:
        raise UserError(
            f"got dtypes {q_BLGK.dtype}, {k_BLGK.dtype} and {v_BLHV.dtype}; expected one dtype for q, k and v."
        )
