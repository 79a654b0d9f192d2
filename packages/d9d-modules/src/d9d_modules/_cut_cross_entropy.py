"""Cut Cross Entropy (arXiv:2411.09009), an optional package: when it can serve, and how it is called."""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY


def why_not_cut_cross_entropy(hidden_TD: Tensor, num_weights: int, loss: object) -> str | None:
    """Why the package cannot compute a loss; None if it can.

    Args:
        hidden_TD: The hidden states.
        num_weights: Number of tensors that the vocabulary is split into.
        loss: What is to be computed.
    """
    if find_spec("cut_cross_entropy") is None:
        return "it is not installed: pip install 'd9d-modules[cut-cross-entropy]'"
    if hidden_TD.device.type in ("cpu", "meta"):
        return f"it needs an accelerator, the hidden states are on {hidden_TD.device.type}"
    if hidden_TD.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, the hidden states are {hidden_TD.dtype}"
    if num_weights > 1:
        return f"it takes one weight, the vocabulary is in {num_weights} splits"
    if loss != PLAIN_CROSS_ENTROPY:
        return f"it computes plain cross entropy, not {loss}"
    return None


def cut_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, softcap: float | None) -> Tensor:
    """Losses [T] in float32 by the package's kernel; it leaves no small gradients out, as it would by default.

    Args:
        hidden_TD: Hidden states [T, D].
        weight_VD: Projection to the vocabulary [V, D].
        labels_T: Token ids [T].
        softcap: Takes `softcap * tanh(x / softcap)` for each logit `x`.
    """
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


def require_cut_cross_entropy(reason: str | None) -> None:
    """Refuse a request that the package cannot serve.

    Raises:
        UserError: If there is a reason.
    """
    if reason is not None:
        raise UserError(
            f"the loss backend 'cut_cross_entropy' cannot serve: {reason}. Use 'chunked', or None to choose."
        )
