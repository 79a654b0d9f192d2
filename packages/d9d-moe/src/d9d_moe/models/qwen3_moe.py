"""Qwen3-MoE, arXiv:2505.09388: the Qwen3 decoder with mixture-of-experts blocks instead of dense feed-forward blocks.

The model classes are aliases of those in `moe_heads`.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules import AttentionOptions, GroupedQueryAttention, Qwen3Params, SwiGLU
from d9d_moe.layer import NO_LOSSES, MoELayer
from d9d_moe.models.moe_decoder import BackboneSizes, MoeDecoder
from d9d_moe.models.moe_heads import MoeForCausalLM, MoeForClassification, MoeForEmbedding
from d9d_moe.router import TopKRouter, check_top_k
from d9d_moe.router_losses import RouterLosses


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeParams:
    """Parameters of a Qwen3-MoE model.

    Attributes:
        decoder: Parameters of all parts except the experts; its `intermediate_size` is used in the dense layers.
        num_experts: Number of experts of each sparse layer.
        top_k: Number of experts per token.
        expert_intermediate_size: Intermediate size of each expert.
        renormalize: Scale the weights of a token's experts to sum to 1.
        dense_layers: Indices of the layers with a dense feed-forward block.
        router_losses: Auxiliary losses of the routers.
    """

    decoder: Qwen3Params
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()
    router_losses: RouterLosses = NO_LOSSES

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: If a field is out of range; the message has its name, its value and the expected range.
        """
        for name, value in (
            ("num_experts", self.num_experts),
            ("expert_intermediate_size", self.expert_intermediate_size),
        ):
            if value <= 0:
                raise UserError(f"{name} = {value}; expected a number above 0.")
        check_top_k(self.top_k, self.num_experts)
        outside = [index for index in self.dense_layers if index not in range(self.decoder.num_layers)]
        if outside:
            raise UserError(
                f"dense_layers has the index {outside[0]}; expected indices from 0 to {self.decoder.num_layers - 1}, "
                f"because decoder.num_layers = {self.decoder.num_layers}."
            )

    @property
    def backbone_sizes(self) -> BackboneSizes:
        """See `MoeDecoderParams`."""
        sizes = self.decoder
        return BackboneSizes(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            rotary_dim=sizes.head_dim,
            tie_word_embeddings=sizes.tie_word_embeddings,
            rope_theta=sizes.rope_theta,
            rope_scaling=sizes.rope_scaling,
            rope_length=sizes.rope_length,
            rms_norm_eps=sizes.rms_norm_eps,
            initializer_range=sizes.initializer_range,
            max_position_embeddings=sizes.max_position_embeddings,
        )

    def attention(self, index: int) -> nn.Module:
        """See `MoeDecoderParams`."""
        sizes = self.decoder
        return GroupedQueryAttention(
            sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            qk_norm_eps=sizes.rms_norm_eps,
            options=AttentionOptions(window=sizes.window(index)),
            init_std=sizes.initializer_range,
        )

    def feed_forward(self, index: int) -> nn.Module:
        """See `MoeDecoderParams`."""
        hidden_size, init_std = self.decoder.hidden_size, self.decoder.initializer_range
        if index in self.dense_layers:
            return SwiGLU(hidden_size, self.decoder.intermediate_size, init_std=init_std)
        router = TopKRouter(
            hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            renormalize=self.renormalize,
            init_std=init_std,
        )
        return MoELayer(
            hidden_size, self.expert_intermediate_size, router=router, losses=self.router_losses, init_std=init_std
        )


Qwen3MoeModel: TypeAlias = MoeDecoder
"""Backbone without a head."""

Qwen3MoeForCausalLM: TypeAlias = MoeForCausalLM
"""Backbone with a language-model head."""

Qwen3MoeForClassification: TypeAlias = MoeForClassification
"""Backbone with a head that returns class logits per row."""

Qwen3MoeForEmbedding: TypeAlias = MoeForEmbedding
"""Backbone with a head that returns an embedding per row."""
