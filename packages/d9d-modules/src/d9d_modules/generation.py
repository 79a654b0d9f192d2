"""Sampling from a language model, to read what it has learned."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.errors import UserError


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    max_context: int,
    pad_to_multiple_of: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of `input_ids`, one token at a time.

    The whole context is computed again for each token: there is no key/value cache. A sharded model works too if all
    its ranks call this together with equal arguments and equally seeded generators; the collectives are those of its
    forward pass.

    Args:
        model: Maps token ids [B, L] to logits [B, L, V]; put it into evaluation mode first if that makes a difference.
        input_ids: Prompts [B, L], int64, L >= 1, all of one length.
        max_new_tokens: Number of tokens to add to each row.
        max_context: The model sees at most this many of the latest tokens; their positions start at 0.
        pad_to_multiple_of: The model sees rows filled up on the right to a multiple of this length, which causal
            attention does not notice: what context and tensor parallelism share out must divide.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_k: Draw among this many likeliest tokens only; None for all.
        generator: Source of randomness, on the device of the logits; None for torch's default.

    Returns:
        Prompts with their continuations [B, L + max_new_tokens].

    Raises:
        UserError: If the prompt is not [B, L] with L >= 1, or an option is out of its range.
    """
    _check_options(input_ids, max_context=max_context, temperature=temperature, top_k=top_k)
    if pad_to_multiple_of < 1:
        raise UserError(f"pad_to_multiple_of = {pad_to_multiple_of}; expected at least 1.")
    for _ in range(max_new_tokens):
        context_BL = input_ids[:, -max_context:]
        length = context_BL.shape[1]
        logits_BV = model(F.pad(context_BL, (0, -length % pad_to_multiple_of)))[:, length - 1]
        next_B1 = _choose(logits_BV, temperature=temperature, top_k=top_k, generator=generator)
        input_ids = torch.cat((input_ids, next_B1), dim=1)
    return input_ids


def _choose(logits_BV: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row [B, 1]."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        threshold_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, float("-inf"))
    return torch.multinomial((logits_BV.float() / temperature).softmax(dim=-1), num_samples=1, generator=generator)


def _check_options(input_ids: Tensor, *, max_context: int, temperature: float, top_k: int | None) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise UserError(f"input_ids have shape {tuple(input_ids.shape)}; expected [batch, length] with length >= 1.")
    if max_context < 1:
        raise UserError(f"max_context = {max_context}; expected at least 1 token.")
    if temperature < 0:
        raise UserError(f"temperature = {temperature}; expected 0 (the likeliest token) or more.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k}; expected at least 1, or None for all tokens.")
