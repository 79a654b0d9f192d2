"""DeepSeek-V3, arXiv:2412.19437: latent attention, dense layers, then layers with shared and routed experts.

The model classes are aliases of those in `moe_heads`.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules import (
    AttentionOptions,
    MultiHeadLatentAttention,
    RopeScaling,
    RotaryLayout,
    SwiGLU,
    YarnScaling,
)
from d9d_moe.layer import NO_LOSSES, MoELayer
from d9d_moe.models.moe_decoder import BackboneSizes, MoeDecoder
from d9d_moe.models.moe_heads import MoeForCausalLM, MoeForClassification, MoeForEmbedding
from d9d_moe.router import SigmoidRouter, check_groups, check_top_k
from d9d_moe.router_losses import RouterLosses
from d9d_moe.shared_experts import SharedExperts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Params:
    """Parameters of a DeepSeek-V3 model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        num_heads: Number of attention heads.
        kv_rank: Size of the latent vector of keys and values.
        q_rank: Size of the latent vector of queries; None projects queries from the hidden states directly.
        head_dim: Features per head of queries and keys without RoPE.
        rotary_dim: Features per head of queries and keys with RoPE; even.
        value_dim: Features per head of values.
        intermediate_size: Intermediate size of dense feed-forward blocks.
        num_dense_layers: Number of layers with a dense feed-forward block; they come first.
        num_experts: Number of routed experts of each sparse layer.
        top_k: Number of routed experts per token.
        expert_intermediate_size: Intermediate size of each expert.
        num_shared_experts: Number of shared experts of that intermediate size; 0 for none.
        num_groups: Number of groups of routed experts.
        top_groups: Number of groups from which the experts of a token are chosen.
        renormalize: Scale the weights of a token's experts to sum to 1.
        routed_scale: Factor of the weights, applied after renormalization.
        router_losses: Auxiliary losses of the routers; the paper uses a small sequence-level balance loss.
        rotary_layout: Layout of the pairs of features that RoPE rotates.
        tie_word_embeddings: Tie the weight of the head to the token embedding.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: RoPE scaling for long sequences; None for no scaling. YaRN with `mscale_all_dim` also changes the
            softmax scale.
        rope_length: Sequence length for a scaling that depends on it; None for the longest sequence of each call.
        rms_norm_eps: Epsilon of the norms of the hidden states.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Longest supported sequence; positions must be smaller.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_rank: int
    q_rank: int | None
    head_dim: int
    rotary_dim: int
    value_dim: int
    intermediate_size: int
    num_dense_layers: int
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    num_shared_experts: int = 1
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.0
    router_losses: RouterLosses = NO_LOSSES
    rotary_layout: RotaryLayout = "interleaved"
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_length: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: If a field is out of range; the message has its name, its value and the expected range.
        """
        for name, value in (
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("kv_rank", self.kv_rank),
            ("q_rank", 1 if self.q_rank is None else self.q_rank),
            ("head_dim", self.head_dim),
            ("rotary_dim", self.rotary_dim),
            ("value_dim", self.value_dim),
            ("intermediate_size", self.intermediate_size),
            ("num_experts", self.num_experts),
            ("expert_intermediate_size", self.expert_intermediate_size),
            ("routed_scale", self.routed_scale),
            ("rope_theta", self.rope_theta),
            ("rope_length", 1 if self.rope_length is None else self.rope_length),
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
            ("max_position_embeddings", self.max_position_embeddings),
        ):
            if value <= 0:
                raise UserError(f"{name} = {value}; expected a number above 0.")
        if self.num_shared_experts < 0:
            raise UserError(f"num_shared_experts = {self.num_shared_experts}; expected 0 (no shared experts) or above.")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise UserError(
                f"num_dense_layers = {self.num_dense_layers}; expected 0 to num_layers = {self.num_layers}."
            )
        if self.rotary_dim % 2:
            raise UserError(
                f"rotary_dim = {self.rotary_dim}; expected an even number, because RoPE rotates pairs of features."
            )
        check_top_k(self.top_k, self.num_experts)
        check_groups(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )

    @property
    def backbone_sizes(self) -> BackboneSizes:
        """See `MoeDecoderParams`."""
        return BackboneSizes(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            rotary_dim=self.rotary_dim,
            tie_word_embeddings=self.tie_word_embeddings,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            rope_length=self.rope_length,
            rms_norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
            max_position_embeddings=self.max_position_embeddings,
        )

    def attention(self, index: int) -> nn.Module:
        """See `MoeDecoderParams`; the attention is the same in all layers."""
        scale = (self.head_dim + self.rotary_dim) ** -0.5
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.mscale_all_dim:
            scale *= self.rope_scaling.temperature(self.rope_scaling.mscale_all_dim) ** 2
        return MultiHeadLatentAttention(
            self.hidden_size,
            num_heads=self.num_heads,
            kv_rank=self.kv_rank,
            q_rank=self.q_rank,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            value_dim=self.value_dim,
            rotary_layout=self.rotary_layout,
            options=AttentionOptions(scale=scale),
            init_std=self.initializer_range,
        )

    def feed_forward(self, index: int) -> nn.Module:
        """See `MoeDecoderParams`."""
        if index < self.num_dense_layers:
            return SwiGLU(self.hidden_size, self.intermediate_size, init_std=self.initializer_range)
        router = SigmoidRouter(
            self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            renormalize=self.renormalize,
            scale=self.routed_scale,
            init_std=self.initializer_range,
        )
        shared_size = self.num_shared_experts * self.expert_intermediate_size
        return MoELayer(
            self.hidden_size,
            self.expert_intermediate_size,
            router=router,
            shared=(
                SharedExperts(self.hidden_size, shared_size, init_std=self.initializer_range) if shared_size else None
            ),
            losses=self.router_losses,
            init_std=self.initializer_range,
        )


DeepseekV3Model: TypeAlias = MoeDecoder
"""Backbone without a head."""

DeepseekV3ForCausalLM: TypeAlias = MoeForCausalLM
"""Backbone with a language-model head."""

DeepseekV3ForClassification: TypeAlias = MoeForClassification
"""Backbone with a head that returns class logits per row."""

DeepseekV3ForEmbedding: TypeAlias = MoeForEmbedding
"""Backbone with a head that returns an embedding per row."""
