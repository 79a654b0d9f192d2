"""Numbers of rows on the host. Fake tensors have no values, so a dry run of a job assumes balanced routing."""

from math import comb

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def counts_on_host(counts_G: Tensor, *, num_rows: int) -> list[int]:
    """Return the number of rows of each group, `num_rows` in all. A host-device synchronization.

    For a fake tensor, the rows are split evenly: the sizes of two groups differ by at most 1.
    """
    if not isinstance(counts_G, FakeTensor):
        return counts_G.tolist()
    share, rest = divmod(num_rows, len(counts_G))
    return [share + (group < rest) for group in range(len(counts_G))]


def balanced_rows(num_tokens: int, *, num_experts: int, top_k: int, num_ranks: int) -> int:
    """Return the mean number of tokens that a rank sends to each rank, if every set of experts is equally likely.

    A token is sent once to each rank that has any of its experts, so the mean is T (1 - C(E - E / R, A) / C(E, A)),
    rounded, for T tokens, E experts, A experts per token (top-k) and R ranks. C is the binomial coefficient.
    """
    elsewhere = comb(num_experts - num_experts // num_ranks, top_k) / comb(num_experts, top_k)
    return round(num_tokens * (1 - elsewhere))
