"""Text generation: sample tokens from a language model."""

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
    """Sample a continuation of each prompt, one token at a time.

    There is no key/value cache: each new token recomputes the whole context. The only collectives are those of the
    model's forward pass. For a sharded model, all ranks need equal arguments and equally seeded generators.

    Args:
        model: Maps token ids [B, L] to logits [B, L, V]. Call `eval()` first if the model has a training mode.
        input_ids: Prompts [B, L], int64, L >= 1, all of the same length.
        max_new_tokens: Number of tokens to add to each row.
        max_context: Maximum context length. Longer rows are truncated on the left, and positions restart at 0.
        pad_to_multiple_of: Pad rows on the right to a multiple of this length, as context and tensor parallelism need.
            With causal attention the padding does not change the results.
        temperature: Divisor of the logits; 0 selects greedy decoding.
        top_k: Sample only from this many most likely tokens; None samples from all.
        generator: Random generator on the device of the logits; None for torch's default.

    Returns:
        Prompts with their continuations [B, L + max_new_tokens].

    Raises:
        UserError: If `input_ids` is not [B, L] with L >= 1, or an option is out of range.
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
    """Sample one token per row [B, 1]."""
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
        raise UserError(f"temperature = {temperature}; expected 0 (greedy decoding) or more.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k}; expected at least 1, or None for all tokens.")
