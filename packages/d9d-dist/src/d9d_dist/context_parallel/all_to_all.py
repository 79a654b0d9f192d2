"""Context parallelism by all-to-all: each rank attends over whole rows with some of the heads.

Shape legend: B batch, L this rank's length, S length of the whole row, H query heads, G key/value heads, K head dim, R
ranks.
"""

from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives.differentiable import all_to_all_reshard, gather_from_axis
from d9d_dist.context_parallel._chunk_order import check_part, to_natural_order, to_rank_order
from d9d_dist.context_parallel.attention import Attention, AttentionOfHeads
from d9d_dist.errors import UserError


@final
class AllToAllAttention:
    """Context-parallel attention in which each rank has H / R query heads over whole rows: Ulysses, arXiv:2309.14509.

    Forward issues one all-to-all of queries, keys and values together, one of the output, and one all-gather of the
    document ids, if any. Backward issues the same two all-to-alls. If there are fewer key/value heads than ranks,
    key/value heads are repeated so that each rank has one; the paper has no grouped-query attention.

    Args:
        attention: Attention over whole rows; called with L = S. An `AttentionOfHeads` is called for this rank's heads
            only.
        mesh: Mesh of one axis, over which rows are split by `ContextSplit`.
    """

    def __init__(self, attention: Attention, mesh: DeviceMesh) -> None:
        self._attention = attention
        self._mesh = mesh

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        """Compute `Attention`. All arguments and the output are this rank's part of the rows.

        Raises:
            UserError: If the length of the part is odd, R does not divide H, or neither of R and G divides the other.
        """
        check_part(q_BLHK.shape[1])
        num_ranks = self._mesh.size()
        num_copies = _repeats_per_kv_head(q_BLHK.shape[2], k_BSGK.shape[2], num_ranks)
        if num_copies > 1:
            k_BSGK = k_BSGK.repeat_interleave(num_copies, dim=2)
            v_BSGK = v_BSGK.repeat_interleave(num_copies, dim=2)
        heads = [x.unflatten(2, (num_ranks, -1)) for x in (q_BLHK, k_BSGK, v_BSGK)]
        whole = all_to_all_reshard(torch.cat(heads, dim=3), self._mesh, scatter_dim=2, gather_dim=1).squeeze(2)
        whole = to_natural_order(whole, num_ranks, dim=1)
        q_BSHK, k_BSGK, v_BSGK = whole.split([x.shape[3] for x in heads], dim=2)
        if documents_BS is not None:
            gathered = gather_from_axis(documents_BS, self._mesh, dim=1, gradient="equal")
            documents_BS = to_natural_order(gathered, num_ranks, dim=1)
        attended_BSHK = self._attention_for_local_heads(q_BSHK.shape[2])(
            q_BSHK, k_BSGK, v_BSGK, documents_BS=documents_BS
        )
        attended_BSHK = to_rank_order(attended_BSHK, num_ranks, dim=1)
        return all_to_all_reshard(attended_BSHK, self._mesh, scatter_dim=1, gather_dim=2)

    def _attention_for_local_heads(self, num_heads: int) -> Attention:
        if not isinstance(self._attention, AttentionOfHeads):
            return self._attention
        first = self._mesh.get_local_rank() * num_heads
        return self._attention.of_heads(slice(first, first + num_heads))


def _repeats_per_kv_head(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return the number of copies of each key/value head such that each rank gets the heads that its queries need."""
    fitting = [
        degree
        for degree in range(1, num_heads + 1)
        if num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
    ]
    if num_ranks not in fitting:
        raise UserError(
            f"got {num_ranks} context-parallel ranks for {num_heads} query heads and {num_kv_heads} key/value heads; "
            f"expected a degree of {', '.join(map(str, fitting))} for method 'all_to_all'. Use one of them, or the "
            "method 'all_gather' or 'ring'."
        )
    return max(1, num_ranks // num_kv_heads)
