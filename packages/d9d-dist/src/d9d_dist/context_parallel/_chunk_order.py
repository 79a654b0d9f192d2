"""Order of a row's chunks: by position or by rank.

A row is cut into 2R chunks; rank r of R holds chunks r and 2R-1-r. Under a causal mask, early chunks need little work
and late chunks need much, so all of these pairs need equal work.
"""

import torch
from torch import Tensor

from d9d_dist.errors import UserError


def rank_chunks(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the position indices of a rank's two chunks."""
    return rank, 2 * num_ranks - 1 - rank


def to_natural_order(x: Tensor, num_ranks: int, *, dim: int) -> Tensor:
    """Reorder chunks from rank order (the ranks' parts concatenated) to position order. 2R must divide the dim."""
    held = _chunks_of_ranks(num_ranks)
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[held.index(chunk)] for chunk in range(2 * num_ranks)], dim)


def to_rank_order(x: Tensor, num_ranks: int, *, dim: int) -> Tensor:
    """Reorder chunks from position order to rank order (the ranks' parts concatenated). 2R must divide the dim."""
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[chunk] for chunk in _chunks_of_ranks(num_ranks)], dim)


def _chunks_of_ranks(num_ranks: int) -> list[int]:
    return [chunk for rank in range(num_ranks) for chunk in rank_chunks(rank, num_ranks)]


def check_part(length: int) -> None:
    """Raise `UserError` if the length of a rank's part is odd: a part consists of two equal chunks."""
    if length % 2:
        raise UserError(
            f"got {length} positions on this rank; expected an even number: two equal chunks of each sequence. "
            "Split the sequences with ContextSplit."
        )
