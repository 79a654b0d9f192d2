import math

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_modules import GroupedQueryAttention, RMSNorm, apply_rotary, rotary_tables


def _by_hand(attention: GroupedQueryAttention, x: Tensor, position_ids: Tensor, *, theta: float) -> Tensor:
    """One query head and one position at a time."""
    head_dim = attention.head_dim
    tables = rotary_tables(position_ids, head_dim=head_dim, theta=theta)
    q, k, v = (
        (x @ projection.weight.T).unflatten(-1, (-1, head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = apply_rotary(q, tables), apply_rotary(k, tables)
    group = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for row in range(x.shape[0]):
        for head in range(q.shape[2]):
            for now in range(x.shape[1]):
                scores = k[row, : now + 1, head // group] @ q[row, now, head] / math.sqrt(head_dim)
                out[row, now, head] = scores.softmax(0) @ v[row, : now + 1, head // group]
    return out.flatten(-2) @ attention.o_proj.weight.T


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6])
def test_matches_a_loop_over_positions(num_heads: int, num_kv_heads: int, qk_norm_eps: float | None) -> None:
    attention = GroupedQueryAttention(
        12, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, qk_norm_eps=qk_norm_eps, init_std=0.5
    ).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    attended = attention(x, rotary_tables(position_ids, head_dim=8, theta=100.0))
    torch.testing.assert_close(attended, _by_hand(attention, x, position_ids, theta=100.0), rtol=1e-10, atol=1e-10)


def test_qk_norm_is_over_each_head_and_optional() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with_norm = GroupedQueryAttention(12, **sizes, qk_norm_eps=1e-5)
    assert isinstance(with_norm.q_norm, RMSNorm)
    assert isinstance(with_norm.k_norm, RMSNorm)
    assert with_norm.q_norm.weight.shape == with_norm.k_norm.weight.shape == (8,)
    assert with_norm.q_norm.eps == with_norm.k_norm.eps == 1e-5
    without = GroupedQueryAttention(12, **sizes)
    assert [name for name, _ in without.named_parameters()] == [f"{p}_proj.weight" for p in "qkvo"]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_heads = 6, num_kv_heads = 4; .* use a num_kv_heads that divides"):
        GroupedQueryAttention(12, num_heads=6, num_kv_heads=4, head_dim=8)
