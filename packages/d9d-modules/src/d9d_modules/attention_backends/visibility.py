"""Who attends to whom, as a mask, for backends that know no better; and where packed documents begin and end.

Shape legend: B batch, L query length, S key length, H query heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist.errors import UserError


def visible(
    length: int, key_length: int, *, window: int | None, documents_BS: Tensor | None, device: torch.device
) -> Tensor:
    """The keys that each of the last L of S positions sees, boolean: [L, S], or [B, 1, L, S] with documents."""
    before = key_length - length
    queries_L1 = torch.arange(before, key_length, device=device).unsqueeze(-1)
    keys_S = torch.arange(key_length, device=device)
    seen_LS = keys_S <= queries_L1
    if window is not None:
        seen_LS = seen_LS & (queries_L1 - keys_S < window)
    if documents_BS is None:
        return seen_LS
    same_BLS = documents_BS[:, before:, None] == documents_BS[:, None, :]
    return (same_BLS & seen_LS).unsqueeze(1)


def check_documents(documents_BL: Tensor | None, positions: Sequence[int]) -> None:
    """Check that document ids are those of a layer's positions.

    Args:
        documents_BL: What the layer was given.
        positions: Its batch and length, B and L.

    Raises:
        UserError: If there is not one integer for each position.
    """
    if documents_BL is None:
        return
    if documents_BL.shape != tuple(positions) or documents_BL.is_floating_point():
        raise UserError(
            f"got documents of the shape {tuple(documents_BL.shape)} and dtype {documents_BL.dtype}; expected integers "
            f"{tuple(positions)}, the document of each position."
        )


def document_runs(documents_BS: Tensor) -> list[list[int]] | None:
    """The lengths of each row's documents in their order, or None if one is not in one piece.

    Reads values: waits for the device where the tensor is not on the CPU.
    """
    starts_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0), value=True)
    runs: list[list[int]] = []
    for ids, starts in zip(documents_BS.tolist(), starts_BS.tolist(), strict=True):
        borders = [position for position, is_start in enumerate(starts) if is_start]
        if len({ids[position] for position in borders}) < len(borders):
            return None
        runs.append([end - start for start, end in zip(borders, [*borders[1:], len(ids)], strict=True)])
    return runs


def documents_of_lengths(cumulative_lengths: Tensor, *, batch: int, length: int) -> Tensor:
    """Document ids [B, L] of rows that were packed one after another. No host synchronisation.

    Args:
        cumulative_lengths: Where documents end in the B * L positions, from 0 on: [N + 1], integer, growing, as
            variable-length kernels take them (`cu_seqlens`). A document that ends in a later row is cut at the rows'
            border. What is not covered at the end is a document too (padding).
        batch: Number of rows.
        length: Positions in a row.
    """
    positions = torch.arange(batch * length, device=cumulative_lengths.device)
    ids = torch.searchsorted(cumulative_lengths.to(positions.dtype).contiguous(), positions, right=True)
    return ids.view(batch, length)
