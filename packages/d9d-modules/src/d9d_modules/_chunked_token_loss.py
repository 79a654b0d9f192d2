"""Arbitrary token losses, computed chunk by chunk over the tokens.

Shape legend: T tokens (t of a chunk), D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.gradients.first_derivative import first_derivative_only
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

    Raises:
        UserError: In forward, if `token_loss` draws random numbers. In backward, if it uses a parameter, or another
            tensor that requires a gradient.
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
        is_checked = type(hidden_TD) is Tensor and not torch.compiler.is_compiling()
        before = _random_state(hidden_TD.device) if is_checked else None
        losses_T = torch.cat(
            [
                options.token_loss(_wide_capped(F.linear(hidden_tD, weight_VD), options.softcap), labels_t)
                for hidden_tD, labels_t in _chunks(weight_VD, hidden_TD, labels_T)
            ]
        )
        if before is not None and not torch.equal(before, _random_state(hidden_TD.device)):
            raise UserError(
                "token_loss drew random numbers; expected a function of the logits and labels, because backward calls "
                "it again and would draw others. Compute logits without labels, and the loss from them."
            )
        return losses_T

    @staticmethod
    @first_derivative_only("the losses of a language-model head")
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
                _check_no_other_leaf(losses_t, leaf_tV)
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


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _check_no_other_leaf(losses: Tensor, logits: Tensor) -> None:
    nodes, seen = [losses.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not logits:
            raise UserError(
                f"token_loss uses a tensor of shape {tuple(leaf.shape)} that requires a gradient; expected only logits "
                "and labels, because the head computes no gradient of other tensors. Detach it, or compute logits "
                "without labels, and the loss from them."
            )
        nodes += [each for each, _ in node.next_functions]
