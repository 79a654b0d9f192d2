"""Causal grouped-query attention; multi-head and multi-query attention are its two ends.

Shape legend: B batch, L length, D hidden size, H query heads, G key/value heads, K head dim.
"""

from typing import final

from torch import Tensor, nn

from d9d_dist import Attention, UserError, sdpa_attention
from d9d_modules.linear import Linear
from d9d_modules.rms_norm import RMSNorm
from d9d_modules.rope import RotaryTables, apply_rotary


@final
class GroupedQueryAttention(nn.Module):
    """Each key/value head serves `num_heads / num_kv_heads` query heads ("GQA", arXiv:2305.13245).

    Args:
        hidden_size: Size of the last dim of input and output.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Size of one head; need not be `hidden_size / num_heads`.
        qk_norm_eps: Epsilon of an RMS norm on each query and key head; None for no norm.
        init_std: Standard deviation of the initial projection weights.

    Attributes:
        attention_function: Computes attention from queries, keys and values: the place for another kernel, or for a
            context-parallel form (`d9d_dist.parallelize_context`).

    Raises:
        UserError: If `num_kv_heads` does not divide `num_heads`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise UserError(
                f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}; each key/value head must serve equally many "
                f"query heads: use a num_kv_heads that divides num_heads."
            )
        self.head_dim = head_dim
        self.attention_function: Attention = sdpa_attention
        self.q_proj = Linear(hidden_size, num_heads * head_dim, init_std=init_std)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, init_std=init_std)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, init_std=init_std)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, init_std=init_std)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BLD: Tensor, rotary: RotaryTables) -> Tensor:
        """Let each position attend to itself and to those before it in its row.

        Args:
            x_BLD: Hidden states [B, L, D].
            rotary: Tables of the positions; they rotate queries and keys and do not change who attends to whom.

        Returns:
            The attended values [B, L, D], in the dtype of `x_BLD`.
        """
        q_BLHK = self._split_heads(self.q_proj(x_BLD))
        k_BLGK = self._split_heads(self.k_proj(x_BLD))
        v_BLGK = self._split_heads(self.v_proj(x_BLD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK, k_BLGK = apply_rotary(q_BLHK, rotary), apply_rotary(k_BLGK, rotary)
        attended_BLHK = self.attention_function(q_BLHK, k_BLGK, v_BLGK)
        return self.o_proj(attended_BLHK.flatten(start_dim=-2))

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, so that a tensor-parallel projection may give only this rank's heads.
        return x.view(*x.shape[:-1], -1, self.head_dim)
