"""Causal grouped-query attention; multi-head and multi-query attention are its two ends.

Shape legend: B batch, L length, D hidden size, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from d9d_dist import Attention, ColumnParallel, RowParallel, TensorRegion, TensorStyle, UserError
from d9d_modules.attention_backends import AttentionBackend, AttentionBackendName, AttentionOptions, chosen_attention
from d9d_modules.attention_backends.visibility import check_documents
from d9d_modules.attention_sinks import AttentionSinks, HeadParallel
from d9d_modules.linear import Linear
from d9d_modules.norm import RMSNorm
from d9d_modules.rope import RotaryLayout, RotaryTables, apply_rotary, check_rotary_sizes, check_tables


@final
class GroupedQueryAttention(nn.Module):
    """Each key/value head serves `num_heads / num_kv_heads` query heads ("GQA", arXiv:2305.13245).

    Args:
        hidden_size: Size of the last dim of input and output.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Size of one head; need not be `hidden_size / num_heads`.
        qk_norm_eps: Epsilon of an RMS norm on each query and key head; None for no norm.
        output_gate: Whether what was attended is multiplied by `sigmoid(x @ gate.T)`, feature by feature, before the
            output projection: "Gated Attention" (arXiv:2505.06708), equation 5 at the position G1, as in Qwen3-Next.
        sinks: Whether each query head has a learnable score to attend to nothing with; see `AttentionSinks`.
        rotary_dim: How many features of a head are rotated, the first ones; None for all.
        rotary_layout: Which features are rotated together.
        options: Sliding window, softmax scale and softcap; None for none of them.
        backends: Which backends may compute the attention, the preferred first; None for the best one that is
            installed. The environment variable `D9D_ATTENTION` takes the place of it when the layer is built.
        init_std: Standard deviation of the initial projection weights and sinks.

    Attributes:
        attention_function: Computes attention from queries, keys and values: the place for another kernel, or for a
            context-parallel form (`d9d_dist.parallelize_context`). At first it chooses a backend for each call.

    Raises:
        UserError: If `num_kv_heads` does not divide `num_heads`, or a name in `backends` is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
        output_gate: bool = False,
        sinks: bool = False,
        rotary_dim: int | None = None,
        rotary_layout: RotaryLayout = "half",
        options: AttentionOptions | None = None,
        backends: Sequence[AttentionBackendName | AttentionBackend] | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise UserError(
                f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}; each key/value head must serve equally many "
                f"query heads: use a num_kv_heads that divides num_heads."
            )
        check_rotary_sizes(head_dim, head_dim if rotary_dim is None else rotary_dim)
        options = AttentionOptions() if options is None else options
        self.head_dim = head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.rotary_layout: RotaryLayout = rotary_layout
        self.q_proj = Linear(hidden_size, num_heads * head_dim, init_std=init_std)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, init_std=init_std)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, init_std=init_std)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, init_std=init_std)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.gate_proj = Linear(hidden_size, num_heads * head_dim, init_std=init_std) if output_gate else None
        self.sinks = AttentionSinks(num_heads, init_std=init_std) if sinks else None
        self.attention_function: Attention = chosen_attention(options, sinks=self.sinks, backends=backends)

    def forward(self, x_BLD: Tensor, rotary: RotaryTables, *, documents_BL: Tensor | None = None) -> Tensor:
        """Let each position attend to itself and to those before it in its row.

        Args:
            x_BLD: Hidden states [B, L, D].
            rotary: Tables of the positions; they rotate queries and keys and do not change who attends to whom.
            documents_BL: Which document each position belongs to [B, L], integers, for rows into which several are
                packed: a position attends within its document only. None: each row is one document.

        Returns:
            The attended values [B, L, D], in the dtype of `x_BLD`.

        Raises:
            UserError: If tables or documents do not fit, or no backend serves what the layer needs.
        """
        check_tables(rotary, x_BLD.shape[:2], rotary_dim=self.rotary_dim)
        check_documents(documents_BL, x_BLD.shape[:2])
        q_BLHK = self._split_heads(self.q_proj(x_BLD))
        k_BLGK = self._split_heads(self.k_proj(x_BLD))
        v_BLGK = self._split_heads(self.v_proj(x_BLD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK = apply_rotary(q_BLHK, rotary, layout=self.rotary_layout)
        k_BLGK = apply_rotary(k_BLGK, rotary, layout=self.rotary_layout)
        attended = self.attention_function(q_BLHK, k_BLGK, v_BLGK, documents_BS=documents_BL).flatten(start_dim=-2)
        if self.gate_proj is not None:
            attended = attended * torch.sigmoid(self.gate_proj(x_BLD))
        return self.o_proj(attended)

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, so that a tensor-parallel projection may give only this rank's heads.
        return x.unflatten(-1, (-1, self.head_dim))


def attention_tensor_plan(name: str, *, head_dim: int, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
    """The part of a plan for `parallelize_tensor` that splits a `GroupedQueryAttention` by heads.

    The degree divides the number of key/value heads. Output gate and sinks are split with them where there are any.

    Args:
        name: What the layer is called in the model, as in `layers.*.attention`.
        head_dim: That of the layer.
        sequence_parallel: Whether hidden states come and go with a part of the sequence on each rank, or equal on all.
    """
    activation = Shard(1) if sequence_parallel else Replicate()
    heads = ColumnParallel(input=None, head_dim=head_dim)
    return {
        name: TensorRegion(input=activation),
        f"{name}.q_proj": heads,
        f"{name}.k_proj": heads,
        f"{name}.v_proj": heads,
        f"{name}.gate_proj": heads,
        f"{name}.sinks": HeadParallel(),
        f"{name}.o_proj": RowParallel(output=activation),
    }
