"""Dense attention masks, and the boundaries of packed documents.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_modules.attention_backends.backend import AttentionOptions


def visible(
    q_BLHK: Tensor,
    k_BSGK: Tensor,
    options: AttentionOptions,
    *,
    documents_BS: Tensor | None,
    mask_BLS: Tensor | None = None,
) -> Tensor:
    """Return a boolean mask of keys visible to the queries, the last L of S positions: [L, S], or [B, 1, L, S].

    The mask has a batch dim if the call has documents or a mask; see `AttentionFeatures`.
    """
    key_length, window = k_BSGK.shape[1], options.window
    before = key_length - q_BLHK.shape[1]
    keys_S = torch.arange(key_length, device=q_BLHK.device)
    queries_L1 = keys_S[before:].unsqueeze(-1)
    distances_LS = queries_L1 - keys_S
    seen = distances_LS >= 0 if options.is_causal else torch.ones_like(distances_LS, dtype=torch.bool)
    if window is not None:
        seen = seen & (distances_LS.abs() < window)
    if mask_BLS is not None:
        seen = seen & mask_BLS
    if documents_BS is not None:
        seen = seen & (documents_BS[:, before:, None] == documents_BS[:, None, :])
    return seen if seen.dim() == 2 else seen.unsqueeze(1)


def check_mask(attention_mask: Tensor | None, positions: Sequence[int]) -> None:
    """Raise a `UserError` if the mask passed to a layer is neither None nor a boolean tensor [B, L, L] or [1, L, L]."""
    if attention_mask is None:
        return
    batch, length = positions
    if attention_mask.dtype != torch.bool or attention_mask.shape not in {(n, length, length) for n in (1, batch)}:
        raise UserError(
            f"got an attention_mask of shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}; expected "
            f"torch.bool of shape {(batch, length, length)} or {(1, length, length)}, True where a query (dim 1) "
            "attends to a key (dim 2)."
        )


def check_documents(document_ids_BL: Tensor | None, positions: Sequence[int]) -> None:
    """Raise a `UserError` if the document ids passed to a layer are neither None nor an integer tensor [B, L]."""
    if document_ids_BL is not None and (
        document_ids_BL.shape != tuple(positions) or document_ids_BL.is_floating_point()
    ):
        raise UserError(
            f"got document_ids_BL of shape {tuple(document_ids_BL.shape)} and dtype {document_ids_BL.dtype}; expected "
            f"integers of shape {tuple(positions)}, the document id of each position."
        )


def document_runs(documents_BS: Tensor) -> list[list[int]] | None:
    """Return the document lengths of each row in order, or None if a document is not contiguous.

    Synchronizes with the device unless the tensor is on the CPU.
    """
    runs: list[list[int]] = []
    for ids in documents_BS.tolist():
        documents = [(id_, sum(1 for _ in run)) for id_, run in itertools.groupby(ids)]
        if len(dict(documents)) < len(documents):
            return None
        runs.append([length for _, length in documents])
    return runs


def document_starts(document_ids_BL: Tensor) -> Tensor:
    """Return a boolean mask [B, L]: True where the document id differs from that of the previous position.

    The first position of a row is False. A document id that reappears after another id starts a new document.
    """
    return F.pad(document_ids_BL[:, 1:] != document_ids_BL[:, :-1], (1, 0), value=False)[:, : document_ids_BL.shape[1]]


def documents_of_lengths(cumulative_lengths: Tensor, *, batch: int, length: int) -> Tensor:
    """Return document ids [B, L] for cumulative document lengths. No host-device synchronization.

    `cumulative_lengths` (`cu_seqlens` of variable-length kernels) counts over the B * L positions of all rows: [N + 1],
    integer, increasing, starting with 0. A document that crosses a row boundary is split there. Positions after the
    last document form one more document (padding).
    """
    positions = torch.arange(batch * length, device=cumulative_lengths.device)
    ids = torch.searchsorted(cumulative_lengths.to(positions.dtype).contiguous(), positions, right=True)
    return ids.view(batch, length)
