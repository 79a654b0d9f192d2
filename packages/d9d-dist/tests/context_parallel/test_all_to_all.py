from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.context_parallel.all_to_all import AllToAllAttention, _repeats_per_kv_head
from d9d_dist.context_parallel.attention import sdpa_attention
from d9d_dist.testing import run_ranks


def _calls(heads: int, kv_heads: int) -> tuple[list[tuple[int, ...]], int]:
    """Return the shapes passed to the attention function, and the number of all-to-alls."""
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        shapes: list[tuple[int, ...]] = []

        def attention(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
            assert documents_BS is None
            shapes.extend(tuple(x.shape) for x in (q_BLHK, k_BSGK, v_BSGK))
            return sdpa_attention(q_BLHK, k_BSGK, v_BSGK)

        form = AllToAllAttention(attention, ctx.mesh_for("batch")["cp"])
        q, k, v = (torch.randn(1, 4, n, 3, device=ctx.device).requires_grad_() for n in (heads, kv_heads, kv_heads))
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges:
            form(q, k, v).sum().backward()
        return shapes, exchanges.call_count


class _Scaled:
    """Attention with a factor per query head."""

    def __init__(self, factors_H: Tensor) -> None:
        self.factors_H = factors_H

    def of_heads(self, heads: slice) -> "_Scaled":
        return _Scaled(self.factors_H[heads])

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        attended = sdpa_attention(q_BLHK, k_BSGK, v_BSGK, documents_BS=documents_BS)
        return attended * self.factors_H.unsqueeze(-1)


def _scaled_and_plain() -> tuple[Tensor, Tensor]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        mesh, factors = ctx.mesh_for("batch")["cp"], torch.arange(1.0, 5.0, device=ctx.device)
        inputs = [torch.randn(1, 4, heads, 3, device=ctx.device) for heads in (4, 2, 2)]
        scaled, plain = (AllToAllAttention(each, mesh)(*inputs) for each in (_Scaled(factors), sdpa_attention))
        return scaled.cpu(), (plain * factors.unsqueeze(-1)).cpu()


def test_a_factor_per_query_head_is_split_with_the_heads() -> None:
    for scaled, expected in run_ranks(_scaled_and_plain, world_size=2):
        torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "local_kv_heads"), [(8, 4, 2), (4, 2, 1), (6, 1, 1)])
def test_heads_are_divided_over_ranks(heads: int, kv_heads: int, local_kv_heads: int) -> None:
    for shapes, num_exchanges in run_ranks(_calls, heads, kv_heads, world_size=2):
        assert shapes == [(1, 8, heads // 2, 3), (1, 8, local_kv_heads, 3), (1, 8, local_kv_heads, 3)]
        assert num_exchanges == 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "copies"),
    [(8, 4, 2, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 2, 8, 4), (12, 3, 6, 2)],
)
def test_key_value_heads_are_repeated_as_little_as_possible(
    heads: int, kv_heads: int, num_ranks: int, copies: int
) -> None:
    assert _repeats_per_kv_head(heads, kv_heads, num_ranks) == copies


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "possible"),
    [(6, 2, 4, "1, 2, 6"), (12, 4, 3, "1, 2, 4, 12"), (4, 4, 8, "1, 2, 4")],
)
def test_context_parallel_degrees_that_the_heads_do_not_allow_are_refused(
    heads: int, kv_heads: int, num_ranks: int, possible: str
) -> None:
    message = (
        f"got {num_ranks} context-parallel ranks for {heads} query heads and {kv_heads} key/value heads; "
        f"expected a degree of {possible} for method 'all_to_all'. Use one of them, or the method 'all_gather'"
    )
    with pytest.raises(UserError, match=message):
        _repeats_per_kv_head(heads, kv_heads, num_ranks)
