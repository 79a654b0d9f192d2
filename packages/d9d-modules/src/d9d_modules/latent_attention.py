"""Multi-head latent attention (MLA): keys and values of all heads come from one low-rank latent vector per position.

Shape legend: B batch, L length, D hidden size, H heads, C latent size, N non-rotated features of a head, R rotated
features, V value features of a head, K = max(N + R, V).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from d9d_dist import Attention, ColumnParallel, RowParallel, TensorRegion, TensorStyle
from d9d_dist.errors import check_choice
from d9d_modules.attention_backends.backend import AttentionBackend, AttentionOptions
from d9d_modules.attention_backends.choice import AttentionBackendName, chosen_attention
from d9d_modules.attention_backends.visibility import check_documents
from d9d_modules.linear import Linear
from d9d_modules.mixer_cache import CachedAttention
from d9d_modules.norm import RMSNorm
from d9d_modules.rope import RotaryLayout, RotaryTables, apply_rotary, check_tables


@final
class MultiHeadLatentAttention(CachedAttention):
    """MLA of DeepSeek-V2 (arXiv:2405.04434), equations 37 to 47, and DeepSeek-V3 (arXiv:2412.19437), equations 1 to 11.

    Keys and values are expanded for every head: `kv_up_proj` is not absorbed into the queries. Each query and key head
    has N non-rotated and R rotated features. All heads share the rotated features of the key.

    Args:
        kv_rank: Size of the latent vector of keys and values.
        q_rank: Size of the latent vector of queries; None projects queries directly from the input.
        head_dim: N, number of non-rotated features of a query or key head.
        rotary_dim: R, number of rotated features; even.
        value_dim: V, number of features of a value head.
        rotary_layout: Pairing of the rotated features.
        options: Sliding window, softmax scale and softcap; None for plain causal attention. The default scale is
            1/sqrt(N + R). With YaRN, DeepSeek multiplies it by `YarnScaling.temperature(mscale_all_dim) ** 2`.
        backends: See `GroupedQueryAttention`.

    Attributes:
        attention_function: See `GroupedQueryAttention`. Queries, keys and values are zero-padded to the head dim K.

    Raises:
        UserError: If a name in `backends` or the layout is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        kv_rank: int,
        q_rank: int | None = None,
        head_dim: int,
        rotary_dim: int,
        value_dim: int,
        norm_eps: float = 1e-6,
        rotary_layout: RotaryLayout = "interleaved",
        options: AttentionOptions | None = None,
        backends: Sequence[AttentionBackendName | AttentionBackend] | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim, self.value_dim, self.kv_rank = head_dim, rotary_dim, value_dim, kv_rank
        check_choice("rotary_layout", rotary_layout, RotaryLayout)
        self.rotary_layout: RotaryLayout = rotary_layout
        query_size = num_heads * (head_dim + rotary_dim)
        if q_rank is None:
            self.q_proj = Linear(hidden_size, query_size, init_std=init_std)
            self.q_down_proj = self.q_norm = self.q_up_proj = None
        else:
            self.q_proj = None
            self.q_down_proj = Linear(hidden_size, q_rank, init_std=init_std)
            self.q_norm = RMSNorm(q_rank, eps=norm_eps)
            self.q_up_proj = Linear(q_rank, query_size, init_std=init_std)
        self.kv_down_proj = Linear(hidden_size, kv_rank + rotary_dim, init_std=init_std)
        self.kv_norm = RMSNorm(kv_rank, eps=norm_eps)
        self.kv_up_proj = Linear(kv_rank, num_heads * (head_dim + value_dim), init_std=init_std)
        self.o_proj = Linear(num_heads * value_dim, hidden_size, init_std=init_std)
        options = AttentionOptions() if options is None else options
        if options.scale is None and value_dim > head_dim + rotary_dim:
            options = replace(options, scale=(head_dim + rotary_dim) ** -0.5)  # the default would use the padded dim
        self.attention_function: Attention = chosen_attention(options, backends=backends)

    def forward(self, x_BLD: Tensor, rotary: RotaryTables, *, document_ids_BL: Tensor | None = None) -> Tensor:
        """See `GroupedQueryAttention.forward`; the rotary tables have R / 2 pairs."""
        check_tables(rotary, x_BLD.shape[:2], rotary_dim=self.rotary_dim)
        check_documents(document_ids_BL, x_BLD.shape[:2])
        q_BLHK, (latent_BLC, k_BLR) = self._queries(x_BLD, rotary), self._latents(x_BLD, rotary)
        if self._cache is not None:
            # The cache holds latent vectors. Each pass expands the latent vectors of all positions.
            document_ids_BL, (latent_BLC, k_BLR) = self._cache.extend(document_ids_BL, latent_BLC, k_BLR)
        k_BLHK, v_BLHV = self._keys_and_values(latent_BLC, k_BLR)
        # Attention functions take one head dim. Zero-padding changes neither scores nor the first V output features.
        # On meta, FLOPs are counted, and products with zeros do not count.
        missing = 0 if x_BLD.is_meta else v_BLHV.shape[-1] - q_BLHK.shape[-1]
        v_BLHK = F.pad(v_BLHV, (0, max(-missing, 0)))
        q_BLHK, k_BLHK = (F.pad(x, (0, missing)) if missing > 0 else x for x in (q_BLHK, k_BLHK))
        attended_BLHK = self.attention_function(q_BLHK, k_BLHK, v_BLHK, documents_BS=document_ids_BL)
        return self.o_proj(attended_BLHK[..., : self.value_dim].flatten(start_dim=-2))

    def tensor_plan(self, name: str, *, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
        """Return the plan, which splits heads; see `HasTensorPlan`. The degree must divide the number of heads.

        The projections to the latent vectors and their norms are replicated.
        """
        activation = Shard(1) if sequence_parallel else Replicate()
        queries = ColumnParallel(input=None, head_dim=self.head_dim + self.rotary_dim)
        return {
            name: TensorRegion(input=activation),
            f"{name}.q_proj": queries,
            f"{name}.q_up_proj": queries,
            f"{name}.kv_up_proj": ColumnParallel(input=None, head_dim=self.head_dim + self.value_dim),
            f"{name}.o_proj": RowParallel(output=activation),
        }

    def _queries(self, x_BLD: Tensor, rotary: RotaryTables) -> Tensor:
        if self.q_proj is not None:
            features = self.q_proj(x_BLD)
        else:
            assert self.q_down_proj is not None
            assert self.q_norm is not None
            assert self.q_up_proj is not None
            features = self.q_up_proj(self.q_norm(self.q_down_proj(x_BLD)))
        # Infer the number of heads: a tensor-parallel projection returns only this rank's heads.
        q_BLHNR = features.unflatten(-1, (-1, self.head_dim + self.rotary_dim))
        q_BLHN, q_BLHR = q_BLHNR.split([self.head_dim, self.rotary_dim], dim=-1)
        return torch.cat((q_BLHN, apply_rotary(q_BLHR, rotary, layout=self.rotary_layout)), dim=-1)

    def _latents(self, x_BLD: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor]:
        """Compute the tensors that all heads share: normalized latent vectors, and rotated features of the keys."""
        latent_BLC, k_BLR = self.kv_down_proj(x_BLD).split([self.kv_rank, self.rotary_dim], dim=-1)
        k_BL1R = apply_rotary(k_BLR.unsqueeze(-2), rotary, layout=self.rotary_layout)
        return self.kv_norm(latent_BLC), k_BL1R.squeeze(-2)

    def _keys_and_values(self, latent_BLC: Tensor, k_BLR: Tensor) -> tuple[Tensor, Tensor]:
        kv_BLHNV = self.kv_up_proj(latent_BLC).unflatten(-1, (-1, self.head_dim + self.value_dim))
        k_BLHN, v_BLHV = kv_BLHNV.split([self.head_dim, self.value_dim], dim=-1)
        k_BLHR = k_BLR.unsqueeze(-2).expand(*k_BLHN.shape[:-1], -1)
        return torch.cat((k_BLHN, k_BLHR), dim=-1), v_BLHV
