from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import MeshConfig
from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_dist.context_parallel.attention import sdpa_attention
from d9d_dist.testing import run_ranks


def _calls() -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Return the query and key lengths passed to the attention function, and the number of collectives."""
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        lengths: list[tuple[int, int]] = []

        def attention(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
            assert documents_BS is not None
            assert documents_BS.shape == k_BSGK.shape[:2] == v_BSGK.shape[:2]
            lengths.append((q_BLHK.shape[1], k_BSGK.shape[1]))
            return sdpa_attention(q_BLHK, k_BSGK, v_BSGK, documents_BS=documents_BS)

        form = AllGatherAttention(attention, ctx.mesh_for("batch")["cp"])
        q, k, v = (torch.randn(1, 6, heads, 4, device=ctx.device).requires_grad_() for heads in (4, 2, 2))
        with (
            patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathers,
            patch.object(dist, "reduce_scatter_tensor", wraps=dist.reduce_scatter_tensor) as reductions,
        ):
            form(q, k, v, documents_BS=torch.zeros(1, 6, dtype=torch.int64, device=ctx.device)).sum().backward()
        return lengths, {"all-gather": gathers.call_count, "reduce-scatter": reductions.call_count}


def test_each_chunk_attends_to_its_prefix_only() -> None:
    for rank, (lengths, collectives) in enumerate(run_ranks(_calls, world_size=4)):
        assert lengths == [(3, 3 * (rank + 1)), (3, 3 * (8 - rank))]
        assert collectives == {"all-gather": 2, "reduce-scatter": 1}
