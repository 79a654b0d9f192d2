"""Gated DeltaNet: linear attention by the gated delta rule, in the place of an attention layer.

Shape legend: B batch, L length, D hidden size, G query/key heads, H value heads, K features of a key, V of a value.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from d9d_dist import (
    ColumnParallel,
    RowParallel,
    TensorRegion,
    TensorStyle,
    UserError,
)
from d9d_modules.attention_backends.visibility import check_documents
from d9d_modules.attention_sinks import HeadParallel
from d9d_modules.convolution import CausalConvolution
from d9d_modules.decay_gate import DecayGate, DecayParallel
from d9d_modules.delta_rule import DeltaRuleBackend, gated_delta_rule
from d9d_modules.gated_norm import GatedRMSNorm
from d9d_modules.linear import Linear
from d9d_modules.rope import RotaryTables

_NORM_EPS = 1e-6
"""Keeps queries and keys of zeros from being divided by zero."""


@final
class GatedDeltaNet(nn.Module):
    """The token mixer of "Gated Delta Networks" (arXiv:2412.06464), figure 1, as in Qwen3-Next.

    Queries, keys and values are projected, mixed over a few positions, and given to `gated_delta_rule`, with queries
    and keys of length 1; what it reads is normalised and gated. Time and memory are linear in the length.

    For tensor parallelism see `gated_delta_tensor_plan`. There is no context parallelism: `parallelize_context` refuses
    a model with such a layer. It would need parts of a row that are in one piece on each rank, in the order of ranks,
    where `ContextSplit` balances causal attention with two; the last `conv_width - 1` positions of the rank before;
    and the state there, which is an affine function of that of the rank before it (a matrix [K, K] and a state [K, V]
    for each head), so that a scan over ranks gives it.

    Args:
        hidden_size: Size of the last dim of input and output.
        num_key_heads: Number of query and key heads; divides `num_value_heads`.
        num_value_heads: Number of value heads, each with a state of its own.
        key_dim: Size of one query or key.
        value_dim: Size of one value.
        conv_width: Positions that the convolutions of queries, keys and values mix.
        norm_eps: Epsilon of the RMS norm of what is read.
        backend: How the rule is computed; see `gated_delta_rule`.
        init_std: Standard deviation of the initial projection weights.

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
        backend: DeltaRuleBackend | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if num_key_heads < 1 or num_value_heads < 1 or num_value_heads % num_key_heads:
            raise UserError(
                f"num_key_heads = {num_key_heads}, num_value_heads = {num_value_heads}; each key head must serve "
                "equally many value heads: use a num_key_heads that divides num_value_heads."
            )
        self.key_dim, self.value_dim = key_dim, value_dim
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
        self.decay_gate = DecayGate(num_value_heads)
        self.gate_proj = Linear(hidden_size, value_size, init_std=init_std)
        self.norm = GatedRMSNorm(value_dim, eps=norm_eps)
        self.o_proj = Linear(value_size, hidden_size, init_std=init_std)

    @property
    def why_whole_rows(self) -> str:
        """See `d9d_dist.NeedsWholeRows`."""
        return "takes its state through a row from the first position to the last"

    def forward(
        self, x_BLD: Tensor, rotary: RotaryTables | None = None, *, documents_BL: Tensor | None = None
    ) -> Tensor:
        """Let each position read what those before it in its row, and itself, have left in the state.

        Args:
            x_BLD: Hidden states [B, L, D].
            rotary: Not looked at, since a recurrence knows the order: here for layers that are called like attention.
            documents_BL: Which document each position belongs to [B, L], integers, for rows into which several are
                packed; an id that comes again after another one starts a document anew. None: each row is one.

        Returns:
            What was read [B, L, D], in the dtype of `x_BLD`.

        Raises:
            UserError: If documents do not fit, or the backend cannot serve.
        """
        check_documents(documents_BL, x_BLD.shape[:2])
        # Numbers of heads are inferred, so that tensor-parallel projections may give only this rank's heads.
        q_BLGK, k_BLGK, v_BLHV = (
            F.silu(conv(projection(x_BLD), documents_BL=documents_BL)).unflatten(-1, (-1, head_dim))
            for projection, conv, head_dim in (
                (self.q_proj, self.q_conv, self.key_dim),
                (self.k_proj, self.k_conv, self.key_dim),
                (self.v_proj, self.v_conv, self.value_dim),
            )
        )
        beta_BLH = self.beta_proj(x_BLD)
        read_BLHV, _ = gated_delta_rule(
            _of_length_one(q_BLGK),
            _of_length_one(k_BLGK),
            v_BLHV,
            log_decay_BLH=self.decay_gate(self.decay_proj(x_BLD)),
            beta_BLH=beta_BLH.to(torch.promote_types(beta_BLH.dtype, torch.float32)).sigmoid(),
            documents_BL=documents_BL,
            backend=self.backend,
        )
        gate_BLHV = self.gate_proj(x_BLD).unflatten(-1, (-1, self.value_dim))
        return self.o_proj(self.norm(read_BLHV, gate_BLHV).flatten(start_dim=-2))


def gated_delta_tensor_plan(
    name: str, *, key_dim: int, value_dim: int, sequence_parallel: bool = False
) -> dict[str, TensorStyle]:
    """The part of a plan for `parallelize_tensor` that splits a `GatedDeltaNet` by heads.

    The degree divides both numbers of heads.

    Args:
        name: What the layer is called in the model, as in `layers.*.attention`.
        key_dim: That of the layer.
        value_dim: That of the layer.
        sequence_parallel: Whether hidden states come and go with a part of the sequence on each rank, or equal on all.
    """
    activation = Shard(1) if sequence_parallel else Replicate()
    keys, values = ColumnParallel(input=None, head_dim=key_dim), ColumnParallel(input=None, head_dim=value_dim)
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
        f"{name}.decay_gate": DecayParallel(),
        f"{name}.gate_proj": values,
        f"{name}.o_proj": RowParallel(output=activation),
    }


def _of_length_one(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x ** 2) + eps)` over the last dim, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _NORM_EPS)).to(x.dtype)
