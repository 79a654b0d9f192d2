"""Text generation: sample tokens from a language model.

Shape legend: B batch, P prompt length, N new tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.values.counter_random import mix_bits, uniform_at
from d9d_modules.decoding import CachedContext, NextLogits, WholeContext, evaluating, why_no_cache
from d9d_modules.shared_rows import shared_row_seeds, sharing_of, stopping_groups


@final
class Rollout(NamedTuple):
    """Generated tokens with their log-probabilities.

    Attributes:
        token_ids: Prompts with their continuations [B, P + N], int64. `pad_token` after a stop token. N is smaller than
            `max_new_tokens` if all rows ended earlier.
        mask: True at tokens of the prompts and at generated tokens, stop tokens included; [B, P + N], bool.
        log_probs: Log-probability of each generated token, [B, N], float32; 0 where the mask is False. The distribution
            is the model's own, before temperature, `top_k` and `top_p`.
    """

    token_ids: Tensor
    mask: Tensor
    log_probs: Tensor


@torch.no_grad()
def generate(
    model: Callable[..., Any],
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    max_context: int,
    prompt_mask: Tensor | None = None,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    pad_to_multiple_of: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    row_seeds: Tensor | None = None,
    use_cache: bool | None = None,
    group: dist.ProcessGroup | None = None,
    rows_group: dist.ProcessGroup | None = None,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Rollout:
    """Sample a continuation of each prompt, one token at a time, with the log-probabilities of the tokens.

    A `DecoderForCausalLM` keeps keys, values and states of the positions so far, and computes only the new token. The
    cache changes the results only by rounding. During generation, modules are in evaluation mode and `torch.compile` is
    bypassed.

    Issues the collectives of the model's forward pass. Ranks that compute the same rows, such as tensor-parallel ranks,
    need equal arguments, which one all-gather compares; they sample from the seed of their first rank. Ranks that share
    parameters (FSDP) may have different rows; see `group`.

    Args:
        model: `DecoderForCausalLM`, or a function of token ids [B, L] that returns logits [B, L, V].
        input_ids: Prompts [B, P], int64, P >= 1. Shorter prompts are padded on the left.
        max_new_tokens: Number of tokens to add to each row.
        max_context: Maximum context length. Longer rows are truncated on the left, and positions restart at 0; from
            then on, the context is recomputed for each token.
        prompt_mask: False at left padding [B, P], bool or 0 and 1; None if all prompts have P tokens. With a mask, the
            model also gets `position_ids` and `document_ids_BL`, as in `DecoderModel.forward`.
        stop_tokens: A row ends after the first of these tokens.
        pad_token: Token id after the end of a row.
        pad_to_multiple_of: Pad each forward pass on the right to a multiple of this length, as context and sequence
            parallelism need. With causal attention the padding does not change the results. None for the multiple of a
            model that `SharesRows`, such as `Engine.for_generation()`, or the tensor-parallel degree of a module.
        temperature: Divisor of the logits; 0 selects greedy decoding.
        top_k: Sample only from this many most likely tokens; None samples from all.
        top_p: Sample only from the most likely tokens whose probabilities sum to at least this number ("nucleus
            sampling", arXiv:1904.09751); None samples from all.
        generator: Random generator on the device of the logits; None for torch's default.
        row_seeds: Seed of each row [B], int64; replaces `generator`. A sampled token then depends only on the logits,
            the row's seed and the token's index, and not on how rows are split over batches and ranks.
        use_cache: True to require the cache, False to recompute the context for each token. None uses the cache if the
            model supports it.
        group: Ranks that stop together, because they share parameters and have different rows: others would wait for a
            rank whose rows have ended. None if the model declares them (`SharesRows`), or is a module: the ranks over
            which its parameters are sharded. Required with `stop_tokens` for other callables. One all-reduce per token.
        rows_group: Ranks that compute the same rows; None if the model declares them (`SharesRows`), or is a module.
        on_tokens: Called with the tokens [B] of each step, to stream text; None for no callback.

    Raises:
        UserError: If an argument is out of range, the mask is not left padding, or `use_cache` is True and the model
            does not support it: context parallelism, pipeline stages, RoPE scaling by the length of a row, or a token
            mixer without a cache. On every rank, if arguments differ between ranks that compute the same rows.
    """
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens = {max_new_tokens}; expected 0 or more.")
    _check_options(input_ids, max_context=max_context, temperature=temperature, top_k=top_k, top_p=top_p)
    _check_seeds(row_seeds, input_ids, generator)
    sharing, multiple = sharing_of(model)
    multiple = multiple if pad_to_multiple_of is None else pad_to_multiple_of
    if multiple < 1:
        raise UserError(f"pad_to_multiple_of = {pad_to_multiple_of}; expected at least 1.")
    sharing = sharing if rows_group is None else rows_group
    if sharing is not None and sharing.size() > 1:
        options = {
            "max_new_tokens": max_new_tokens,
            "max_context": max_context,
            "stop_tokens": list(stop_tokens),
            "pad_token": pad_token,
            "pad_to_multiple_of": multiple,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "use_cache": use_cache,
        }
        rows = [input_ids, prompt_mask, row_seeds]
        row_seeds = shared_row_seeds(rows, options, sharing, generator=generator)
    groups = [group] if group is not None else stopping_groups(model)
    mask = None if prompt_mask is None else _checked_mask(prompt_mask, input_ids)
    tokens = _Tokens(input_ids, mask, stop_tokens=stop_tokens, pad_token=pad_token)
    choose = partial(_choose, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator, seeds=row_seeds)
    with evaluating(model):
        compute = _next_logits(
            model,
            use_cache=use_cache,
            capacity=input_ids.shape[1] + max_new_tokens,
            multiple=multiple,
            max_context=max_context,
        )
        try:
            for step in range(max_new_tokens):
                if step > 0 and stop_tokens and tokens.all_done(groups):
                    break
                logits_BV = compute(tokens.ids, tokens.context_mask)
                next_B = tokens.append(choose(logits_BV, step), logits_BV)
                if on_tokens is not None:
                    on_tokens(next_B)
        finally:
            if isinstance(compute, CachedContext):
                compute.close()
    return tokens.rollout()


class _Tokens:
    """State of the generated rows: tokens, masks, log-probabilities, and the rows that have ended."""

    def __init__(self, input_ids: Tensor, mask: Tensor | None, *, stop_tokens: Sequence[int], pad_token: int) -> None:
        (batch, _), device = input_ids.shape, input_ids.device
        self.ids, self.context_mask = input_ids, mask
        self._pad_token = pad_token
        self._stops = torch.tensor(list(stop_tokens), dtype=input_ids.dtype, device=device)
        self._is_done_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self._is_kept = [torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask]
        self._log_probs = [torch.empty(batch, 0, dtype=torch.float32, device=device)]

    def append(self, next_B1: Tensor, logits_BV: Tensor) -> Tensor:
        """Append one token to each row, or padding if the row has ended; return the appended tokens [B]."""
        is_done_B1 = self._is_done_B.unsqueeze(1)
        log_probs_BV = _wide(logits_BV).log_softmax(dim=-1).float()
        self._log_probs.append(log_probs_BV.gather(1, next_B1).masked_fill(is_done_B1, 0.0))
        self._is_kept.append(~is_done_B1)
        next_B1 = next_B1.masked_fill(is_done_B1, self._pad_token)
        self.ids = torch.cat((self.ids, next_B1), dim=1)
        if self.context_mask is not None:
            self.context_mask = F.pad(self.context_mask, (0, 1), value=True)
        self._is_done_B = self._is_done_B | torch.isin(next_B1.squeeze(1), self._stops)
        return next_B1.squeeze(1)

    def all_done(self, groups: Sequence[dist.ProcessGroup]) -> bool:
        """Return True if all rows have ended, on all ranks of nested groups. One all-reduce for each group."""
        is_done = self._is_done_B.all().to(torch.int32)
        for group in groups:
            dist.all_reduce(is_done, op=dist.ReduceOp.MIN, group=group)
        return bool(is_done.item())

    def rollout(self) -> Rollout:
        """Return the result."""
        return Rollout(self.ids, torch.cat(self._is_kept, dim=1), torch.cat(self._log_probs, dim=1))


def _next_logits(
    model: Callable[..., Any], *, use_cache: bool | None, capacity: int, multiple: int, max_context: int
) -> NextLogits:
    reason = why_no_cache(model)
    if use_cache is True and reason is not None:
        raise UserError(
            f"use_cache = True, but {reason}; expected a DecoderForCausalLM that supports a cache. Set use_cache = "
            "False to recompute the context for each token."
        )
    if reason is not None or use_cache is False:
        return WholeContext(model, multiple=multiple, max_context=max_context)
    assert isinstance(model, nn.Module)
    return CachedContext(model, capacity=capacity, multiple=multiple, max_context=max_context)


def _wide(logits_BV: Tensor) -> Tensor:
    """Return logits in at least float32; rounding float64 logits could change the sampled tokens between layouts."""
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))


def _choose(
    logits_BV: Tensor,
    step: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
    seeds: Tensor | None,
) -> Tensor:
    """Sample one token per row [B, 1]."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        threshold_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, float("-inf"))
    probabilities_BV = (_wide(logits_BV) / temperature).softmax(dim=-1)
    if top_p is not None:
        descending_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
        before_BV = descending_BV.cumsum(dim=-1) - descending_BV
        descending_BV = descending_BV.masked_fill(before_BV >= top_p, 0.0)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(-1, order_BV, descending_BV)
    if seeds is None:
        return torch.multinomial(probabilities_BV, num_samples=1, generator=generator)
    vocab, device = probabilities_BV.shape[-1], probabilities_BV.device
    index_V = torch.arange(step * vocab, (step + 1) * vocab, device=device)
    uniform_BV = uniform_at(index_V, mix_bits(seeds.to(device)).unsqueeze(1))
    # The argmax of log p + Gumbel noise has the distribution p.
    return (probabilities_BV.double().log() - (-uniform_BV.log()).log()).argmax(dim=-1, keepdim=True)


def _check_seeds(row_seeds: Tensor | None, input_ids: Tensor, generator: torch.Generator | None) -> None:
    if row_seeds is None:
        return
    if row_seeds.shape != input_ids.shape[:1] or row_seeds.dtype != torch.int64:
        raise UserError(
            f"row_seeds have shape {tuple(row_seeds.shape)} and dtype {row_seeds.dtype}; expected torch.int64 of shape "
            f"{tuple(input_ids.shape[:1])}, one for each row."
        )
    if generator is not None:
        raise UserError("got row_seeds and a generator; expected one of them. Remove the generator.")


def _checked_mask(prompt_mask: Tensor, input_ids: Tensor) -> Tensor:
    if prompt_mask.shape != input_ids.shape:
        raise UserError(
            f"prompt_mask has shape {tuple(prompt_mask.shape)}; expected that of input_ids, {tuple(input_ids.shape)}."
        )
    mask = prompt_mask.bool()
    if not bool((mask[:, -1:].all() & (mask[:, 1:] >= mask[:, :-1]).all()).item()):
        raise UserError(
            "prompt_mask has padding after a token, or a row without tokens; expected padding on the left: each row "
            "ends with a token of its prompt. Pad the prompts on the left."
        )
    return mask


def _check_options(
    input_ids: Tensor, *, max_context: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise UserError(f"input_ids have shape {tuple(input_ids.shape)}; expected [batch, length] with length >= 1.")
    if max_context < 1:
        raise UserError(f"max_context = {max_context}; expected at least 1 token.")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature}; expected 0 (greedy decoding) or more, and finite.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k}; expected at least 1, or None for all tokens.")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p = {top_p}; expected 0 < top_p <= 1, or None for all tokens.")
