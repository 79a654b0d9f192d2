"""Grouped-query attention, with multi-head and multi-query attention as special cases.

Shape legend: B batch, L length, D hidden size, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from d9d_dist import Attention, ColumnParallel, RowParallel, TensorRegion, TensorStyle, UserError
from d9d_dist.errors import check_choice
from d9d_modules.attention_backends.backend import AttentionBackend, AttentionOptions
from d9d_modules.attention_backends.choice import AttentionBackendName, ChosenAttention, chosen_attention
from d9d_modules.attention_backends.visibility import check_documents, check_mask
from d9d_modules.attention_sinks import AttentionSinks, HeadParallel
from d9d_modules.linear import Linear
from d9d_modules.mixer_cache import CachedAttention
from d9d_modules.norm import RMSNorm
from d9d_modules.rope import RotaryLayout, RotaryTables, apply_rotary, check_rotary_sizes, check_tables


@final
class GroupedQueryAttention(CachedAttention):
    """Grouped-query attention ("GQA", arXiv:2305.13245), causal unless `options.is_causal` is False.

    Each key/value head is shared by `num_heads / num_kv_heads` query heads.

    Args:
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Size of one head; may differ from `hidden_size / num_heads`.
        qkv_bias: If True, the query, key and value projections have biases (Qwen2).
        qk_norm_eps: Epsilon of an RMS norm on each query and key head; None disables QK norm.
        zero_centered_norms: If True, the QK norms scale by `1 + weight`; see `RMSNorm`.
        output_gate: If True, multiply the attention output elementwise by `sigmoid(x @ gate.T)` before the output
            projection: "Gated Attention" (arXiv:2505.06708), equation 5 at position G1, as in Qwen3-Next.
        sinks: If True, each query head has a learnable attention sink; see `AttentionSinks`.
        rotary_dim: Number of leading features of each head to rotate; None rotates all.
        rotary_layout: Pairing of the rotated features.
        options: Causality, sliding window, softmax scale and softcap; None for plain causal attention.
        backends: Allowed attention backends in order of preference; None selects the best installed one per call.
            The environment variable `D9D_ATTENTION`, read when the layer is built, overrides `backends`.
        init_std: Standard deviation of the initial projection weights and sinks.

    Attributes:
        attention_function: Function of queries, keys and values, which by default selects a backend for each call.
            Assign another function to use another kernel; `d9d_dist.parallelize_context` assigns a context-parallel
            version.

    Raises:
        UserError: If `num_kv_heads` does not divide `num_heads`, `head_dim` or `rotary_dim` is not valid for RoPE, or a
            name in `backends` or the layout is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        zero_centered_norms: bool = False,
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
                f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}; query heads are divided evenly among "
                "key/value heads: use a num_kv_heads that divides num_heads."
            )
        self.head_dim, self.rotary_dim = head_dim, head_dim if rotary_dim is None else rotary_dim
        check_rotary_sizes(head_dim, self.rotary_dim)
        check_choice("rotary_layout", rotary_layout, RotaryLayout)
        self.rotary_layout: RotaryLayout = rotary_layout
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, init_std=init_std)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=output_bias, init_std=init_std)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, eps=qk_norm_eps, zero_centered=zero_centered_norms)
            self.k_norm = RMSNorm(head_dim, eps=qk_norm_eps, zero_centered=zero_centered_norms)
        self.gate_proj = Linear(hidden_size, num_heads * head_dim, init_std=init_std) if output_gate else None
        self.sinks = AttentionSinks(num_heads, init_std=init_std) if sinks else None
        self.attention_function: Attention = chosen_attention(
            options or AttentionOptions(), sinks=self.sinks, backends=backends
        )

    def forward(
        self,
        x_BLD: Tensor,
        rotary: RotaryTables,
        *,
        document_ids_BL: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention of hidden states [B, L, D]; shape and dtype are unchanged.

        Args:
            x_BLD: Hidden states.
            rotary: Rotary tables of the positions. The causal mask follows the order in the row, not the positions.
            document_ids_BL: Document id of each position [B, L], integer, for packed sequences: a position attends only
                within its document. None: each row is one document.
            attention_mask: Boolean mask [B, L, L] or [1, L, L], True where a query (dim 1) attends to a key (dim 2), in
                addition to causality, window and documents. Each query needs a visible key. None: no mask.

        Raises:
            UserError: If the shape of `rotary`, `document_ids_BL` or `attention_mask` does not match, or no allowed
                backend supports the call. Also if `attention_mask` is given while a key/value cache or another
                attention function (such as the context-parallel one) is in use.
        """
        check_tables(rotary, x_BLD.shape[:2], rotary_dim=self.rotary_dim)
        check_documents(document_ids_BL, x_BLD.shape[:2])
        check_mask(attention_mask, x_BLD.shape[:2])
        q_BLHK = self._split_heads(self.q_proj(x_BLD))
        k_BLGK = self._split_heads(self.k_proj(x_BLD))
        v_BLGK = self._split_heads(self.v_proj(x_BLD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK = apply_rotary(q_BLHK, rotary, layout=self.rotary_layout)
        k_BLGK = apply_rotary(k_BLGK, rotary, layout=self.rotary_layout)
        if self._cache is not None:
            # The cache holds rotated keys.
            document_ids_BL, (k_BLGK, v_BLGK) = self._cache.extend(document_ids_BL, k_BLGK, v_BLGK)
        attention = self.attention_function
        if attention_mask is not None and (self._cache is not None or not isinstance(attention, ChosenAttention)):
            function = type(attention).__name__ if self._cache is None else "with a key/value cache"
            raise UserError(
                f"got an attention_mask for the attention function {function}; expected None, because context-parallel "
                "and custom functions and generation with a cache take no mask. Use document_ids_BL, or a "
                "context-parallel degree of 1."
            )
        masks = {} if attention_mask is None else {"mask_BLS": attention_mask}
        attended_BLHK = attention(q_BLHK, k_BLGK, v_BLGK, documents_BS=document_ids_BL, **masks)
        attended = attended_BLHK.flatten(start_dim=-2)
        if self.gate_proj is not None:
            attended = attended * torch.sigmoid(self.gate_proj(x_BLD))
        return self.o_proj(attended)

    def tensor_plan(self, name: str, *, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
        """Return the plan, which splits heads; see `HasTensorPlan`. The degree must divide `num_kv_heads`."""
        activation = Shard(1) if sequence_parallel else Replicate()
        heads = ColumnParallel(input=None, head_dim=self.head_dim)
        return {
            name: TensorRegion(input=activation),
            f"{name}.q_proj": heads,
            f"{name}.k_proj": heads,
            f"{name}.v_proj": heads,
            f"{name}.gate_proj": heads,
            f"{name}.sinks": HeadParallel(),
            f"{name}.o_proj": RowParallel(output=activation),
        }

    def _split_heads(self, x: Tensor) -> Tensor:
        # Infer the number of heads: a tensor-parallel projection returns only this rank's heads.
        return x.unflatten(-1, (-1, self.head_dim))
