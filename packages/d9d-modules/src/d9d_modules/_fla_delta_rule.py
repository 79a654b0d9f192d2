"""The gated delta rule by the kernels of `fla-core`, an optional package: when they can serve, and how they are called.

Shape legend: B batch, L length, G query/key heads, H value heads, K features of a key, V of a value.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist.errors import UserError

_OLDEST_VERSION = (0, 6)
"""Earlier ones take as many query/key heads as value heads."""

_LARGEST_KEY_DIM = 256

_FORGET = -100.0
"""A logarithm of a decay that leaves nothing in float32, yet is small enough to be summed up with others."""


def why_not_fla(v_BLHV: Tensor, *, key_dim: int) -> str | None:
    """Why the package cannot compute the rule; None if it can.

    Args:
        v_BLHV: The values; queries and keys are of their dtype and device.
        key_dim: Number of features of a key.
    """
    if find_spec("fla") is None:
        return "it is not installed: pip install 'd9d-modules[fla]'"
    reason = _why_not_these(v_BLHV, key_dim)
    if reason is not None:
        return reason
    version: str = import_module("fla").__version__
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST_VERSION:
        return f"it is installed as version {version}, 0.6 is needed: pip install --upgrade 'd9d-modules[fla]'"
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
    """See `d9d_modules.gated_delta_rule`.

    Documents need no lengths, which the device would have to be waited for: a decay of almost zero forgets.

    Args:
        q_BLGK: Queries, bfloat16 or float16 as keys and values.
        k_BLGK: Keys.
        v_BLHV: Values.
        log_decay_BLH: Logarithms of the decays.
        beta_BLH: How much of what a key is read as is replaced.
        starts_BL: Where the state is forgotten before a position, boolean; None for nowhere.
        state_BHKV: The state before the first position; None for zeros.
        scale: What queries are multiplied by.
    """
    log_decay_BLH = log_decay_BLH.float().clamp(min=_FORGET)
    if starts_BL is not None:
        log_decay_BLH = log_decay_BLH.masked_fill(starts_BL.unsqueeze(-1), _FORGET)
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


def require_fla(reason: str | None) -> None:
    """Refuse a request that the package cannot serve.

    Raises:
        UserError: If there is a reason.
    """
    if reason is not None:
        raise UserError(f"the backend 'fla' cannot serve: {reason}. Use 'chunked', or None to choose.")


def _why_not_these(v_BLHV: Tensor, key_dim: int) -> str | None:
    if v_BLHV.device.type in ("cpu", "meta"):
        return f"it needs an accelerator, the values are on {v_BLHV.device.type}"
    if v_BLHV.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, the values are {v_BLHV.dtype}"
    if key_dim > _LARGEST_KEY_DIM:
        return f"it takes keys of at most {_LARGEST_KEY_DIM} features, not of {key_dim}"
    if 0 in v_BLHV.shape:
        return f"it takes no empty tensors, the values have the shape {tuple(v_BLHV.shape)}"
    return None
