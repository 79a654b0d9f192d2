"""Chunked gated delta rule: matrix products within a chunk, a recurrence only between chunks.

"Gated Delta Networks" (arXiv:2412.06464), section 3.3, which extends "Parallelizing Linear Transformers with the Delta
Rule" (arXiv:2406.06484), equations 8 to 11. Within a chunk, g[i, j] is the product of the decays of positions j + 1 to
i. The product from the start of the chunk to i is g[i, start]:

    T = (I + strictly lower part of beta[i] * g[i, j] * (k[i] @ k[j])) ** -1
    written = T @ (beta * v) - T @ (beta * g[., start] * k) @ state
    out = g[., start] * q @ state + (g[i, j] * (q[i] @ k[j])) @ written
    next state = g[end, start] * state + (g[end, .] * k).T @ written

Memory is linear in the length: a state [K, V] and a few matrices [C, C] for each chunk and head.

Shape legend: B batch, L length, G query/key heads, R value heads per key head, N chunks, C chunk size (I, J in pairs of
positions), K key dim, V value dim. A 1 in place of R means that the R heads share a tensor.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F


@final
class DeltaRuleInputs(NamedTuple):
    """Inputs of the gated delta rule. All floating-point tensors have the same dtype, float32 or float64.

    Attributes:
        q: Scaled queries [B, L, G, K].
        k: Keys [B, L, G, K].
        v: Values [B, L, G, R, V].
        log_decay: Logarithms of the decays [B, L, G, R].
        beta: Write strengths [B, L, G, R].
        starts: Boolean mask of the positions before which the state is reset [B, L]; None for no resets.
        state: State before the first position [B, G, R, K, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    starts: Tensor | None
    state: Tensor


def chunked_delta_rule(inputs: DeltaRuleInputs, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return the output [B, L, G, R, V], and the state after the last position [B, G, R, K, V].

    A row that is shorter than `chunk_size` forms one chunk.
    """
    q_BLGK, k_BLGK, v_BLGRV, log_decay_BLGR, beta_BLGR, starts_BL, state_BGRKV = inputs
    length = q_BLGK.shape[1]
    size = max(1, min(chunk_size, length))
    q_BG1NCK, k_BG1NCK = (_chunks(x.unsqueeze(3), size) for x in (q_BLGK, k_BLGK))
    v_BGRNCV, log_decay_BGRNC, beta_BGRNC = (_chunks(x, size) for x in (v_BLGRV, log_decay_BLGR, beta_BLGR))
    run_BNC = None if starts_BL is None else _chunks(starts_BL[:, :, None, None], size)[:, 0, 0].cumsum(dim=-1)
    between_BGRNIJ, since_start_BGRNC = _decays(log_decay_BGRNC, run_BNC)

    beta_BGRNC1 = beta_BGRNC.unsqueeze(-1)
    remembered_BGRNCK = since_start_BGRNC.unsqueeze(-1) * k_BG1NCK
    overlap_BGRNIJ = beta_BGRNC1 * between_BGRNIJ * (k_BG1NCK @ k_BG1NCK.mT)
    solved = torch.linalg.solve_triangular(  # treats the diagonal as ones and ignores the upper triangle
        overlap_BGRNIJ,
        beta_BGRNC1 * torch.cat((v_BGRNCV, remembered_BGRNCK), dim=-1),
        upper=False,
        unitriangular=True,
    )
    new_BGRNCV, old_BGRNCK = solved.split([v_BGRNCV.shape[-1], k_BG1NCK.shape[-1]], dim=-1)
    to_end_BGRNCK = between_BGRNIJ[..., -1, :, None] * k_BG1NCK

    states, written = [], []
    # Use unbind, not an index per chunk: the backward of indexing allocates a tensor of all chunks each time.
    for new_BGRCV, old_BGRCK, to_end_BGRCK, kept_BGR in zip(
        new_BGRNCV.unbind(3),
        old_BGRNCK.unbind(3),
        to_end_BGRNCK.unbind(3),
        since_start_BGRNC[..., -1].unbind(3),
        strict=True,
    ):
        states.append(state_BGRKV)
        written.append(new_BGRCV - old_BGRCK @ state_BGRKV)
        state_BGRKV = kept_BGR[..., None, None] * state_BGRKV + to_end_BGRCK.mT @ written[-1]

    from_state_BGRNCV = (since_start_BGRNC.unsqueeze(-1) * q_BG1NCK) @ torch.stack(states, dim=3)
    within_BGRNCV = (between_BGRNIJ * (q_BG1NCK @ k_BG1NCK.mT)) @ torch.stack(written, dim=3)
    out_BGRLV = (from_state_BGRNCV + within_BGRNCV).flatten(3, 4)[..., :length, :]
    return out_BGRLV.movedim(3, 1), state_BGRKV


def sequential_delta_rule(inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of `chunked_delta_rule`, computed position by position.

    This is the reference implementation, which also suits single decoding steps.
    """
    q_BLGK, k_BLGK, v_BLGRV, log_decay_BLGR, beta_BLGR, starts_BL, state_BGRKV = inputs
    decay_BLGR = log_decay_BLGR.exp()
    if starts_BL is not None:
        decay_BLGR = decay_BLGR.masked_fill(starts_BL[..., None, None], 0.0)
    read = []
    for q_BGK, k_BGK, v_BGRV, decay_BGR, beta_BGR in zip(
        *(x.unbind(1) for x in (q_BLGK, k_BLGK, v_BLGRV, decay_BLGR, beta_BLGR)), strict=True
    ):
        state_BGRKV = decay_BGR[..., None, None] * state_BGRKV
        known_BGRV = torch.einsum("bgk,bgrkv->bgrv", k_BGK, state_BGRKV)
        correction_BGRV = beta_BGR.unsqueeze(-1) * (v_BGRV - known_BGRV)
        state_BGRKV = state_BGRKV + torch.einsum("bgk,bgrv->bgrkv", k_BGK, correction_BGRV)
        read.append(torch.einsum("bgk,bgrkv->bgrv", q_BGK, state_BGRKV))
    return torch.stack(read, dim=1) if read else v_BLGRV, state_BGRKV


def _chunks(x_BLGR: Tensor, size: int) -> Tensor:
    """Reshape [B, L, G, R, ...] to [B, G, R, N, C, ...] with N >= 1; zero padding does not change the state."""
    length = x_BLGR.shape[1]
    num_chunks = max(1, -(-length // size))
    padding = (0, 0) * (x_BLGR.dim() - 2) + (0, num_chunks * size - length)
    return F.pad(x_BLGR, padding).movedim(1, 3).unflatten(3, (num_chunks, size))


def _decays(log_decay_BGRNC: Tensor, run_BNC: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the products of decays g[i, j] [B, G, R, N, I, J] and g[i, start] [B, G, R, N, C].

    A product is zero if j > i, or if a document starts in between. `run_BNC` is the number of document starts in the
    chunk up to each position.
    """
    size = log_decay_BGRNC.shape[-1]
    # Sum for each pair of positions: the difference of two long cumulative sums would lose precision.
    log_between_BGRNIJ = log_decay_BGRNC.unsqueeze(-1).expand(*log_decay_BGRNC.shape, size).tril(-1).cumsum(dim=-2)
    log_since_start_BGRNC = log_decay_BGRNC.cumsum(dim=-1)
    is_hidden = torch.ones(size, size, dtype=torch.bool, device=log_decay_BGRNC.device).triu(1)
    if run_BNC is not None:
        is_hidden = is_hidden | (run_BNC.unsqueeze(-1) != run_BNC.unsqueeze(-2))[:, None, None]
        log_since_start_BGRNC = log_since_start_BGRNC.masked_fill((run_BNC > 0)[:, None, None], -torch.inf)
    return log_between_BGRNIJ.masked_fill(is_hidden, -torch.inf).exp(), log_since_start_BGRNC.exp()
