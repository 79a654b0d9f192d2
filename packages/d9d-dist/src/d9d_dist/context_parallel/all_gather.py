"""Context parallelism by an all-gather of keys and values, for any attention function and any number of heads.

Shape legend: B batch, L this rank's length, S length of the whole row, H query heads, G key/value heads, K head dim.
"""

from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives.differentiable import gather_from_axis
from d9d_dist.context_parallel._chunk_order import check_part, rank_chunks, to_natural_order
from d9d_dist.context_parallel.attention import Attention


@final
class AllGatherAttention:
    """Context-parallel attention that all-gathers keys and values, as in Llama 3 (arXiv:2407.21783, 3.3.2).

    Each of a rank's two chunks attends to its prefix of the row, so masked blocks are not computed. Forward issues one
    all-gather of keys and values together, and one of the document ids, if any. Backward issues one reduce-scatter, in
    the dtype of the keys. During attention a rank holds the keys and values of the whole row.

    Args:
        attention: Attention of a chunk to its prefix; called with L <= S.
        mesh: Mesh of one axis, over which rows are split by `ContextSplit`.
    """

    def __init__(self, attention: Attention, mesh: DeviceMesh) -> None:
        self._attention = attention
        self._mesh = mesh

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        """Compute `Attention`. All arguments and the output are this rank's part of the rows.

        Raises `UserError` if the length of the part is odd.
        """
        check_part(q_BLHK.shape[1])
        num_ranks, size = self._mesh.size(), q_BLHK.shape[1] // 2
        k_BSGK, v_BSGK = self._gather_sequence(torch.cat((k_BSGK, v_BSGK), dim=2)).chunk(2, dim=2)
        if documents_BS is not None:
            documents_BS = self._gather_sequence(documents_BS)
        attended = []
        for q_chunk, chunk in zip(
            q_BLHK.chunk(2, dim=1), rank_chunks(self._mesh.get_local_rank(), num_ranks), strict=True
        ):
            end = (chunk + 1) * size
            documents = None if documents_BS is None else documents_BS[:, :end]
            attended.append(self._attention(q_chunk, k_BSGK[:, :end], v_BSGK[:, :end], documents_BS=documents))
        return torch.cat(attended, dim=1)

    def _gather_sequence(self, x: Tensor) -> Tensor:
        gathered = gather_from_axis(x, self._mesh, dim=1, gradient="partial")
        return to_natural_order(gathered, self._mesh.size(), dim=1)
