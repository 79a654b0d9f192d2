"""Adapter for the gated delta rule kernels of the optional package `fla-core`.

Shape legend: B batch, L length, G query/key heads, H value heads, K key dim, V value dim.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist.install_hint import install_hint

_OLDEST_VERSION = (0, 6)
"""Earlier versions require equal numbers of query/key and value heads."""

_LARGEST_KEY_DIM = 256

_RESET_LOG_DECAY = -100.0
"""Log decay that resets the state: exp(-100) is negligible in float32, and cumulative sums of -100 stay accurate."""


def why_not_fla(v_BLHV: Tensor, *, key_dim: int) -> str | None:
    """Return the reason why the package does not support a call, or None if it does."""
    if find_spec("fla") is None:
        return f"it is not installed: {install_hint('d9d-modules', 'fla')}"
    reason = _unsupported_reason(v_BLHV, key_dim)
    if reason is not None:
        return reason
    version: str = import_module("fla").__version__
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST_VERSION:
        return f"version {version} is installed, 0.6 or later is needed: {install_hint('d9d-modules', 'fla')}"
    return None


def fla_delta_rule(
    q_BLGK: Tensor,
    k_BLGK: Tensor,
    v_BLHV: Tensor,
    *,
    log_decay_BLH: Tensor,
    beta_BLH: Tensor,
    starts_BL: Tensor | None,
    state_BHKV: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute `d9d_modules.gated_delta_rule` for bfloat16 or float16 queries, keys and values.

    A decay of almost zero resets the state at document starts [B, L]. The kernels' own packed-sequence arguments are
    document lengths, which would need a host-device synchronization.
    """
    log_decay_BLH = log_decay_BLH.float().clamp(min=_RESET_LOG_DECAY)
    if starts_BL is not None:
        log_decay_BLH = log_decay_BLH.masked_fill(starts_BL.unsqueeze(-1), _RESET_LOG_DECAY)
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule(
        q_BLGK,
        k_BLGK,
        v_BLHV,
        g=log_decay_BLH,
        beta=beta_BLH,
        scale=scale,
        initial_state=None if state_BHKV is None else state_BHKV.float(),
        output_final_state=True,
    )


def _unsupported_reason(v_BLHV: Tensor, key_dim: int) -> str | None:
    if v_BLHV.device.type in ("cpu", "meta"):
        return f"it needs an accelerator, but the values are on {v_BLHV.device.type}"
    if v_BLHV.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, but the values are {v_BLHV.dtype}"
    if key_dim > _LARGEST_KEY_DIM:
        return f"it supports a key dim of at most {_LARGEST_KEY_DIM}, not {key_dim}"
    if 0 in v_BLHV.shape:
        return f"it does not support empty tensors, but the values have shape {tuple(v_BLHV.shape)}"
    return None
