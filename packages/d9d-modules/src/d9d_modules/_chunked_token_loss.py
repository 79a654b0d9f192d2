"""Arbitrary token losses, computed chunk by chunk over the tokens.

Shape legend: T tokens (t of a chunk), D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from d9d_dist.tensor_parallel.vocab import TokenLoss

_CHUNK_LOGITS = 2**24
"""Number of logits in a chunk: 64 MiB in float32. The loss allocates a few tensors of this size."""


def chunked_token_loss(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, token_loss: TokenLoss, softcap: float | None
) -> Tensor:
    """Compute the losses [T] of any `TokenLoss`, materializing the logits of one chunk of tokens at a time.

    `token_loss` gets logits [t, V] in at least float32. The loss of a token must depend only on its own logits and
    label, and on no other tensor that requires a gradient. Labels and losses may have further dims [T, ...].

    Backward recomputes the logits and losses chunk by chunk, and computes the gradients of `hidden_TD` and `weight_VD`.
    The weight gradient is accumulated over chunks in at least float32. A split backward does not defer the weight
    gradient, because the W pass would have to recompute the losses and their collectives.
    """
    if hidden_TD.is_meta:  # where FLOPs are counted: recomputed logits do not count
        return token_loss(_wide_capped(F.linear(hidden_TD, weight_VD), softcap), labels_T)
    losses_T: Tensor = _ChunkedTokenLoss.apply(hidden_TD, weight_VD, labels_T, _Options(token_loss, softcap))
    return losses_T


def _wide_capped(logits: Tensor, softcap: float | None) -> Tensor:
    return soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap * tanh(logits / softcap)` ("Gemma 2", arXiv:2408.00118, section 2), or `logits` without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class _Options(NamedTuple):
    token_loss: TokenLoss
    softcap: float | None


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, options: _Options) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T)
        ctx.options = options
        return torch.cat(
            [
                options.token_loss(_wide_capped(F.linear(hidden_tD, weight_VD), options.softcap), labels_t)
                for hidden_tD, labels_t in _chunks(weight_VD, hidden_TD, labels_T)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TD, weight_VD, labels_T = ctx.saved_tensors
        token_loss, softcap = ctx.options
        grads_hidden_tD = []
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        for hidden_tD, labels_t, grad_t in _chunks(weight_VD, hidden_TD, labels_T, gradients[0]):
            logits_tV = F.linear(hidden_tD, weight_VD)
            with torch.enable_grad():
                leaf_tV = logits_tV.detach().requires_grad_()
                losses_t = token_loss(_wide_capped(leaf_tV, softcap), labels_t)
            (grad_tV,) = torch.autograd.grad(losses_t, leaf_tV, grad_t)
            if ctx.needs_input_grad[0]:
                grads_hidden_tD.append(grad_tV @ weight_VD)
            if ctx.needs_input_grad[1]:
                grad_weight_VD += grad_tV.T @ hidden_tD
        return (
            torch.cat(grads_hidden_tD) if ctx.needs_input_grad[0] else None,
            grad_weight_VD.to(weight_VD.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def _chunks(weight_VD: Tensor, *per_token: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, _CHUNK_LOGITS // max(1, len(weight_VD)))
    return zip(*(tensor.split(size) for tensor in per_token), strict=True)
