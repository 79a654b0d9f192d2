"""Gated DeltaNet: a linear-attention layer based on the gated delta rule.

Shape legend: B batch, L length, D hidden size, G query/key heads, H value heads, K features of a key, V of a value.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from d9d_dist import ColumnParallel, RowParallel, TensorRegion, TensorStyle, UserError
from d9d_modules.attention_backends.visibility import check_documents
from d9d_modules.attention_sinks import HeadParallel
from d9d_modules.convolution import CausalConvolution
from d9d_modules.decay_gate import DecayGate, LogSigmoidDecayGate
from d9d_modules.delta_context import DeltaContext
from d9d_modules.delta_rule import DeltaRuleBackend, gated_delta_rule
from d9d_modules.linear import Linear
from d9d_modules.mixer_cache import RecurrentCache
from d9d_modules.norm import GatedRMSNorm
from d9d_modules.rope import RotaryTables

_NORM_EPS = 1e-6
"""Epsilon of the L2 norm of queries and keys."""


@final
class GatedDeltaNet(nn.Module):
    """Token mixer of "Gated Delta Networks" (arXiv:2412.06464), figure 1, as in Qwen3-Next.

    Queries, keys and values are projected, convolved with a short causal kernel and passed to `gated_delta_rule`;
    queries and keys are L2-normalized. The output is RMS-normalized and gated. Time and memory are linear in the
    sequence length.

    Context-parallel ranks exchange the last `conv_width - 1` positions of their chunks and the states after them; see
    `DeltaContext`.

    Args:
        num_key_heads: Number of query and key heads; divides `num_value_heads`.
        num_value_heads: Number of value heads; each has its own state.
        conv_width: Kernel width of the causal convolutions of queries, keys and values.
        decay_gate: Module that maps the outputs of `decay_proj` [B, L, H] to logarithms of decays [B, L, H], at most 0;
            None for a `DecayGate`.
        backend: Implementation of the delta rule; see `gated_delta_rule`.

    Attributes:
        context_mesh: Mesh over which rows are split; see `HasContextMesh`.

    Raises:
        UserError: If `num_key_heads` does not divide `num_value_heads`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        decay_gate: DecayGate | LogSigmoidDecayGate | None = None,
        backend: DeltaRuleBackend | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if num_key_heads < 1 or num_value_heads < 1 or num_value_heads % num_key_heads:
            raise UserError(
                f"num_key_heads = {num_key_heads}, num_value_heads = {num_value_heads}; value heads are divided evenly "
                "among key heads: use a num_key_heads that divides num_value_heads."
            )
        self.key_dim, self.value_dim, self.conv_width = key_dim, value_dim, conv_width
        self.context_mesh: DeviceMesh | None = None
        self.backend: DeltaRuleBackend | None = backend
        key_size, value_size = num_key_heads * key_dim, num_value_heads * value_dim
        self.q_proj = Linear(hidden_size, key_size, init_std=init_std)
        self.k_proj = Linear(hidden_size, key_size, init_std=init_std)
        self.v_proj = Linear(hidden_size, value_size, init_std=init_std)
        self.q_conv = CausalConvolution(key_size, width=conv_width)
        self.k_conv = CausalConvolution(key_size, width=conv_width)
        self.v_conv = CausalConvolution(value_size, width=conv_width)
        self.beta_proj = Linear(hidden_size, num_value_heads, init_std=init_std)
        self.decay_proj = Linear(hidden_size, num_value_heads, init_std=init_std)
        self.decay_gate = DecayGate(num_value_heads) if decay_gate is None else decay_gate
        self.gate_proj = Linear(hidden_size, value_size, init_std=init_std)
        self.norm = GatedRMSNorm(value_dim, eps=norm_eps)
        self.o_proj = Linear(value_size, hidden_size, init_std=init_std)
        self._cache: RecurrentCache | None = None

    def forward(
        self, x_BLD: Tensor, rotary: RotaryTables | None = None, *, document_ids_BL: Tensor | None = None
    ) -> Tensor:
        """Compute causal linear attention of hidden states [B, L, D]; shape and dtype are unchanged.

        `rotary` is ignored: a recurrence needs no positions. The argument exists so that the layer can replace an
        attention layer. `document_ids_BL` as in `gated_delta_rule`.

        Raises:
            UserError: If the shape of `document_ids_BL` does not match, or the backend does not support the call. With
                context parallelism, if the number of this rank's positions is odd or below `2 * (conv_width - 1)`.
        """
        check_documents(document_ids_BL, x_BLD.shape[:2])
        features = [projection(x_BLD) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        log_decay_BLH, beta_BLH = self.decay_gate(self.decay_proj(x_BLD)), self.beta_proj(x_BLD)
        beta_BLH = beta_BLH.to(torch.promote_types(beta_BLH.dtype, torch.float32)).sigmoid()
        if self.context_mesh is None:
            read_BLHV = self._read(features, log_decay_BLH, beta_BLH, document_ids_BL)
        else:
            read_BLHV = self._read_with_context(features, log_decay_BLH, beta_BLH, document_ids_BL, self.context_mesh)
        gate_BLHV = self.gate_proj(x_BLD).unflatten(-1, (-1, self.value_dim))
        return self.o_proj(self.norm(read_BLHV, gate_BLHV).flatten(start_dim=-2))

    def _read(
        self, features: Sequence[Tensor], log_decay_BLH: Tensor, beta_BLH: Tensor, document_ids_BL: Tensor | None
    ) -> Tensor:
        """Apply the convolutions and the delta rule without context parallelism; return [B, L, H, V]."""
        conv_ids, length, state_BHKV, backend = document_ids_BL, beta_BLH.shape[1], None, self.backend
        if self._cache is not None:
            conv_ids, features = self._cache.extend_inputs(document_ids_BL, *features)
            # Positions after the new ones are padding: without decay and writes they do not change the state.
            is_padding_L = torch.arange(length, device=beta_BLH.device) >= self._cache.num_new
            log_decay_BLH = log_decay_BLH.masked_fill(is_padding_L[:, None], 0.0)
            beta_BLH = beta_BLH.masked_fill(is_padding_L[:, None], 0.0)
            state_BHKV = self._cache.state
            # A single position does not need the chunked kernel.
            backend = "sequential" if length == 1 and backend is None else backend
        q_BLGK, k_BLGK, v_BLHV = (x[:, x.shape[1] - length :] for x in self._convolved(features, conv_ids))
        read_BLHV, state_BHKV = gated_delta_rule(
            q_BLGK,
            k_BLGK,
            v_BLHV,
            log_decay_BLH=log_decay_BLH,
            beta_BLH=beta_BLH,
            document_ids_BL=document_ids_BL,
            initial_state_BHKV=state_BHKV,
            backend=backend,
        )
        if self._cache is not None:
            self._cache.state = state_BHKV
        return read_BLHV

    def _read_with_context(
        self,
        features: Sequence[Tensor],
        log_decay_BLH: Tensor,
        beta_BLH: Tensor,
        document_ids_BL: Tensor | None,
        mesh: DeviceMesh,
    ) -> Tensor:
        """Compute the same as `_read` for this rank's chunks of each row."""
        num_before = self.conv_width - 1
        batch, length = features[0].shape[:2]
        context = DeltaContext(mesh, (batch, length), document_ids_BL, num_before=num_before)
        extended = context.extended(torch.cat([*features], dim=-1)).split([each.shape[-1] for each in features], dim=-1)
        q_MCGK, k_MCGK, v_MCHV = (x[:, num_before:] for x in self._convolved(extended, context.extended_ids))
        decay_MCH, beta_MCH = context.chunked(log_decay_BLH), context.chunked(beta_BLH)
        read_MCHV, _ = gated_delta_rule(
            q_MCGK,
            k_MCGK,
            v_MCHV,
            log_decay_BLH=decay_MCH,
            beta_BLH=beta_MCH,
            document_ids_BL=context.document_ids_MC,
            initial_state_BHKV=context.state_before(
                k_MCGK, v_MCHV, log_decay_MCH=decay_MCH, beta_MCH=beta_MCH, backend=self.backend
            ),
            backend=self.backend,
        )
        return context.joined(read_MCHV)

    def _convolved(self, features: Sequence[Tensor], document_ids_BL: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the convolutions; return normalized queries and keys [B, L, G, K], and values [B, L, H, V]."""
        # Infer the numbers of heads: tensor-parallel projections return only this rank's heads.
        q_BLGK, k_BLGK, v_BLHV = (
            F.silu(conv(x_BLF, document_ids_BL=document_ids_BL)).unflatten(-1, (-1, head_dim))
            for conv, x_BLF, head_dim in zip(
                (self.q_conv, self.k_conv, self.v_conv),
                features,
                (self.key_dim, self.key_dim, self.value_dim),
                strict=True,
            )
        )
        return _l2_normalized(q_BLGK), _l2_normalized(k_BLGK), v_BLHV

    def why_no_cache(self) -> str | None:
        """See `SupportsCache`."""
        return None

    def start_cache(self, capacity: int) -> RecurrentCache:
        """See `SupportsCache`. Holds the state and the last inputs of the convolutions, for any capacity."""
        self._cache = RecurrentCache(self.conv_width)
        return self._cache

    def drop_cache(self) -> None:
        """See `SupportsCache`."""
        self._cache = None

    def tensor_plan(self, name: str, *, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
        """Return the plan, which splits heads; see `HasTensorPlan`. The degree must divide both numbers of heads."""
        activation = Shard(1) if sequence_parallel else Replicate()
        keys = ColumnParallel(input=None, head_dim=self.key_dim)
        values = ColumnParallel(input=None, head_dim=self.value_dim)
        return {
            name: TensorRegion(input=activation),
            f"{name}.q_proj": keys,
            f"{name}.k_proj": keys,
            f"{name}.v_proj": values,
            f"{name}.q_conv": HeadParallel(),
            f"{name}.k_conv": HeadParallel(),
            f"{name}.v_conv": HeadParallel(),
            f"{name}.beta_proj": ColumnParallel(input=None),
            f"{name}.decay_proj": ColumnParallel(input=None),
            f"{name}.decay_gate": HeadParallel(tuple(self.decay_gate._parameters)),
            f"{name}.gate_proj": values,
            f"{name}.o_proj": RowParallel(output=activation),
        }


def _l2_normalized(x: Tensor) -> Tensor:
    """Return `x / sqrt(sum(x ** 2) + eps)` over the last dim, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _NORM_EPS)).to(x.dtype)
