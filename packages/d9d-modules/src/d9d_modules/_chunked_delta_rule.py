"""The gated delta rule over chunks of positions: matrix products within a chunk, a recurrence only between chunks.

"Gated Delta Networks" (arXiv:2412.06464), section 3.3, on "Parallelizing Linear Transformers with the Delta Rule"
(arXiv:2406.06484), equations 8 to 11. Within a chunk, with g[i, j] the product of the decays after j up to i:

    T = (I + strictly lower part of beta[i] * g[i, j] * (k[i] @ k[j])) ** -1
    written = T @ (beta * v) - T @ (beta * g[., start] * k) @ state
    out = g[., start] * q @ state + (g[i, j] * (q[i] @ k[j])) @ written
    next state = g[end, start] * state + (g[end, .] * k).T @ written

Memory is linear in the length: a state [K, V] and a few matrices [C, C] for each chunk and head.

Shape legend: B batch, L length, G query/key heads, R value heads of each, N chunks, C positions of a chunk, I and J the
same as C where two of them meet, K features of a key, V of a value; 1 for R where the R heads share.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def chunked_delta_rule(
    q_BLGK: Tensor,
    k_BLGK: Tensor,
    v_BLGRV: Tensor,
    *,
    log_decay_BLGR: Tensor,
    beta_BLGR: Tensor,
    starts_BL: Tensor | None,
    state_BGRKV: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See `d9d_modules.gated_delta_rule`.

    Args:
        q_BLGK: Scaled queries; all tensors are of one dtype, float32 or float64.
        k_BLGK: Keys.
        v_BLGRV: Values.
        log_decay_BLGR: Logarithms of the decays.
        beta_BLGR: How much of what a key is read as is replaced.
        starts_BL: Where the state is forgotten before a position, boolean; None for nowhere.
        state_BGRKV: The state before the first position.
        chunk_size: Positions of a chunk; a shorter row is one.

    Returns:
        What was read [B, L, G, R, V], and the state after the last position.
    """
    length = q_BLGK.shape[1]
    size = max(1, min(chunk_size, length))
    q_BG1NCK, k_BG1NCK = (_chunks(x.unsqueeze(3), size) for x in (q_BLGK, k_BLGK))
    v_BGRNCV, log_decay_BGRNC, beta_BGRNC = (_chunks(x, size) for x in (v_BLGRV, log_decay_BLGR, beta_BLGR))
    run_BNC = None if starts_BL is None else _chunks(starts_BL[:, :, None, None], size)[:, 0, 0].cumsum(dim=-1)
    between_BGRNIJ, since_start_BGRNC = _decays(log_decay_BGRNC, run_BNC)

    beta_BGRNC1 = beta_BGRNC.unsqueeze(-1)
    remembered_BGRNCK = since_start_BGRNC.unsqueeze(-1) * k_BG1NCK
    overlap_BGRNIJ = beta_BGRNC1 * between_BGRNIJ * (k_BG1NCK @ k_BG1NCK.mT)
    solved = torch.linalg.solve_triangular(  # the diagonal counts as ones, what is above as zeros
        overlap_BGRNIJ,
        beta_BGRNC1 * torch.cat((v_BGRNCV, remembered_BGRNCK), dim=-1),
        upper=False,
        unitriangular=True,
    )
    new_BGRNCV, old_BGRNCK = solved.split([v_BGRNCV.shape[-1], k_BG1NCK.shape[-1]], dim=-1)
    to_end_BGRNCK = between_BGRNIJ[..., -1, :, None] * k_BG1NCK

    states, written = [], []
    # Not indexed chunk by chunk: the backward of that would make a tensor of all chunks for each.
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


def _chunks(x_BLGR: Tensor, size: int) -> Tensor:
    """[B, L, G, R, ...] as [B, G, R, N, C, ...], one chunk or more, filled up with zeros: those change no state."""
    length = x_BLGR.shape[1]
    num_chunks = max(1, -(-length // size))
    padding = (0, 0) * (x_BLGR.dim() - 2) + (0, num_chunks * size - length)
    return F.pad(x_BLGR, padding).movedim(1, 3).unflatten(3, (num_chunks, size))


def _decays(log_decay_BGRNC: Tensor, run_BNC: Tensor | None) -> tuple[Tensor, Tensor]:
    """Products of decays [B, G, R, N, I, J], after j up to i, and from the start of the chunk up to each position.

    They are zero where j is after i, or a document starts in between.

    Args:
        log_decay_BGRNC: Logarithms of the decays.
        run_BNC: How many documents have started in the chunk; None for none.
    """
    size = log_decay_BGRNC.shape[-1]
    # Summed up for each pair: a difference of two large sums would have lost the digits of a small one.
    log_between_BGRNIJ = log_decay_BGRNC.unsqueeze(-1).expand(*log_decay_BGRNC.shape, size).tril(-1).cumsum(dim=-2)
    log_since_start_BGRNC = log_decay_BGRNC.cumsum(dim=-1)
    is_hidden = torch.ones(size, size, dtype=torch.bool, device=log_decay_BGRNC.device).triu(1)
    if run_BNC is not None:
        is_hidden = is_hidden | (run_BNC.unsqueeze(-1) != run_BNC.unsqueeze(-2))[:, None, None]
        log_since_start_BGRNC = log_since_start_BGRNC.masked_fill((run_BNC > 0)[:, None, None], -torch.inf)
    return log_between_BGRNIJ.masked_fill(is_hidden, -torch.inf).exp(), log_since_start_BGRNC.exp()
