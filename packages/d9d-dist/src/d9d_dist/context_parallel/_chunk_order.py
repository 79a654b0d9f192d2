"""The order of a row's chunks: natural, and as ranks hold them one after another.

A row is cut into 2R chunks; rank r of R holds the chunks r and 2R-1-r. A causal triangle gives early chunks little work
and late ones much, and these two together cost the same on every rank.
"""

import torch
from torch import Tensor

from d9d_dist.errors import UserError


def rank_chunks(rank: int, num_ranks: int) -> tuple[int, int]:
    """Indices of the two chunks of a rank, in natural order."""
    return rank, 2 * num_ranks - 1 - rank


def to_natural_order(x: Tensor, num_ranks: int, *, dim: int) -> Tensor:
    """From the parts of all ranks one after another to whole rows; the dim divides by 2R."""
    held = _chunks_of_ranks(num_ranks)
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[held.index(chunk)] for chunk in range(2 * num_ranks)], dim)


def to_rank_order(x: Tensor, num_ranks: int, *, dim: int) -> Tensor:
    """From whole rows to the parts of all ranks one after another; the dim divides by 2R."""
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[chunk] for chunk in _chunks_of_ranks(num_ranks)], dim)


def _chunks_of_ranks(num_ranks: int) -> list[int]:
    return [chunk for rank in range(num_ranks) for chunk in rank_chunks(rank, num_ranks)]


def check_part(length: int) -> None:
    """Check the length of a rank's part of a row.

    Raises:
        UserError: If it is not two equal chunks.
    """
    if length % 2:
        raise UserError(
            f"got {length} positions on this rank; expected an even number, two equal chunks of each row. "
            "Split rows by ContextSplit."
        )
