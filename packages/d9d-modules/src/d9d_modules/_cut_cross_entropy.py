"""Adapter for the optional package `cut-cross-entropy` (Cut Cross Entropy, arXiv:2411.09009)."""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist.install_hint import install_hint
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY


def why_not_cut_cross_entropy(hidden_TD: Tensor, num_weights: int, loss: object) -> str | None:
    """Return the reason why the package does not support a call, or None if it does."""
    if find_spec("cut_cross_entropy") is None:
        return f"it is not installed: {install_hint('d9d-modules', 'cut-cross-entropy')}"
    if hidden_TD.device.type in ("cpu", "meta"):
        return f"it needs an accelerator, but the hidden states are on {hidden_TD.device.type}"
    if hidden_TD.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, but the hidden states are {hidden_TD.dtype}"
    if num_weights > 1:
        return f"it takes one weight, but the vocabulary has {num_weights} splits"
    if loss != PLAIN_CROSS_ENTROPY:
        return f"it computes plain cross entropy, not {loss}"
    return None


def cut_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, softcap: float | None) -> Tensor:
    """Compute losses [T] in float32 with the package's kernel, with its filtering of small gradients disabled."""
    losses_T: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(
        hidden_TD,
        weight_VD,
        labels_T,
        ignore_index=IGNORED_LABEL,
        softcap=softcap,
        reduction="none",
        filter_eps=None,
        impl="cce",
    )
    return losses_T.float()
