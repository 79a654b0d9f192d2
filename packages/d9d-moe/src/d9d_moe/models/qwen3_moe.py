"""Qwen3-MoE, arXiv:2505.09388: the Qwen3 decoder with a mixture of experts in place of the dense feed-forward."""

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_modules import WHOLE_MODEL, Qwen3Model, Qwen3Params, SwiGLU, qwen3_lm_head
from d9d_moe.layer import MoeFeedForward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeParams:
    """The sizes of a Qwen3-MoE model.

    Attributes:
        decoder: Sizes of everything but the experts; its `intermediate_size` is that of the dense layers.
        num_experts: Number of experts of each sparse layer.
        top_k: Number of experts for each token.
        expert_intermediate_size: Size of the gated space of each expert.
        renormalize: Whether the weights of a token's experts are scaled to sum to 1.
        dense_layers: Indices of the layers that keep a dense feed-forward.
    """

    decoder: Qwen3Params
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            UserError: Naming the field, its value, and what it may be.
        """
        for name, value in (
            ("num_experts", self.num_experts),
            ("expert_intermediate_size", self.expert_intermediate_size),
        ):
            if value <= 0:
                raise UserError(f"{name} = {value}; expected a number above 0.")
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"top_k = {self.top_k}; expected 1 <= top_k <= num_experts = {self.num_experts}.")
        outside = [index for index in self.dense_layers if index not in range(self.decoder.num_layers)]
        if outside:
            raise UserError(
                f"dense_layers names layer {outside[0]}; expected indices from 0 to {self.decoder.num_layers - 1}, "
                f"since decoder.num_layers = {self.decoder.num_layers}."
            )


@final
class Qwen3MoeForCausalLM(nn.Module):
    """The sparse backbone with a language-model head on its last stage.

    Args:
        params: Sizes of the whole model.
        stage: Which part to build.
    """

    def __init__(self, params: Qwen3MoeParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__()
        self.backbone = Qwen3Model(params.decoder, stage, feed_forward=lambda index: _feed_forward(params, index))
        self.lm_head = qwen3_lm_head(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Tensor,
        *,
        position_ids: Tensor | None = None,
        documents_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this stage; arguments and result are those of `d9d_modules.Qwen3ForCausalLM.forward`.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L], integers; None: each row is one.
            labels: The token to predict at each position [B, L], int64; -100 leaves a position out.

        Returns:
            On the last stage losses [B, L] or logits [B, L, V]; hidden states [B, L, D] on every other stage.

        Raises:
            UserError: If the input is not what this stage takes, or positions, documents or labels do not fit it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL)
        return hidden_BLD if self.lm_head is None else self.lm_head(hidden_BLD, labels=labels)


def _feed_forward(params: Qwen3MoeParams, index: int) -> nn.Module:
    decoder = params.decoder
    if index in params.dense_layers:
        return SwiGLU(decoder.hidden_size, decoder.intermediate_size, init_std=decoder.initializer_range)
    return MoeFeedForward(
        decoder.hidden_size,
        params.expert_intermediate_size,
        num_experts=params.num_experts,
        top_k=params.top_k,
        renormalize=params.renormalize,
        init_std=decoder.initializer_range,
    )
