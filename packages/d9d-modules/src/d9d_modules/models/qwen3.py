"""Qwen3 (dense), arXiv:2505.09388: grouped-query attention with QK norm, rotary positions, SwiGLU, RMS norm.

Each pipeline stage builds only its own layers, under the names that they have in the whole model.

Shape legend: B batch, L length, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_modules.attention import GroupedQueryAttention
from d9d_modules.decoder import DecoderLayer
from d9d_modules.embedding import TokenEmbedding
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.rms_norm import RMSNorm
from d9d_modules.rope import rotary_tables
from d9d_modules.swiglu import SwiGLU

FeedForwardFactory: TypeAlias = Callable[[int], nn.Module]
"""Builds the feed-forward block of the layer with the given global index."""

WHOLE_MODEL = StageInfo()
"""The stage of a model that is not split."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Params:
    """The sizes of a Qwen3 model.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; divides `num_heads`.
        head_dim: Size of one head; even.
        intermediate_size: Size between the projections of the feed-forward block.
        tie_word_embeddings: Whether the head uses the weight of the token embedding.
        rope_theta: Base of the rotary wavelengths.
        rms_norm_eps: Epsilon of every norm.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Longest sequence that the model is meant for; written to exported configurations.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            UserError: Naming the field, its value, and what it may be.
        """
        for name, value in (
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
            ("max_position_embeddings", self.max_position_embeddings),
        ):
            if value <= 0:
                raise UserError(f"{name} = {value}; expected a number above 0.")
        if self.num_heads % self.num_kv_heads:
            fitting = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}; "
                f"use one of {', '.join(fitting)}."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim}; rotary positions rotate pairs of features: use an even one.")


@final
class Qwen3Model(nn.Module):
    """The backbone, or one pipeline stage of it: token embedding, decoder layers, final norm.

    Args:
        params: Sizes of the whole model.
        stage: Which part to build; the embedding belongs to the first stage, the final norm to the last. A last stage
            whose head is tied has the embedding too, for the head to use: one parameter, on two stages.
        feed_forward: Builds each layer's feed-forward block; None for the family's SwiGLU.
    """

    def __init__(
        self, params: Qwen3Params, stage: StageInfo = WHOLE_MODEL, *, feed_forward: FeedForwardFactory | None = None
    ) -> None:
        super().__init__()
        self.params = params
        self.stage = stage
        self.embedding = (
            TokenEmbedding(params.vocab_size, params.hidden_size, init_std=params.initializer_range)
            if stage.is_first or (stage.is_last and params.tie_word_embeddings)
            else None
        )
        self.layers = nn.ModuleDict(
            {str(index): _decoder_layer(params, index, feed_forward) for index in stage.layers(params.num_layers)}
        )
        self.norm = RMSNorm(params.hidden_size, eps=params.rms_norm_eps) if stage.is_last else None

    def forward(self, hidden: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row. Where tensor-parallel
                ranks pass on their parts of the sequence, later stages cannot count: pass the positions.

        Returns:
            Hidden states [B, L, D], normalised on the last stage.

        Raises:
            UserError: If the input is not what this stage takes, or the positions do not fit it.
        """
        self._check_inputs(hidden, position_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = rotary_tables(position_ids, head_dim=self.params.head_dim, theta=self.params.rope_theta)
        x_BLD = self.embedding(hidden) if self.stage.is_first and self.embedding is not None else hidden
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, rotary)
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def _check_inputs(self, hidden: Tensor, position_ids: Tensor | None) -> None:
        got = f"{tuple(hidden.shape)} of {hidden.dtype}"
        if self.stage.is_first:
            if hidden.dim() != 2 or hidden.is_floating_point():
                raise UserError(f"the first stage got {got}; expected token ids [batch, length] of torch.int64.")
        elif hidden.dim() != 3 or hidden.shape[-1] != self.params.hidden_size:
            raise UserError(
                f"stage {self.stage.index} got {got}; expected the hidden states of the stage before it, "
                f"[batch, length, {self.params.hidden_size}]."
            )
        batch, length = hidden.shape[:2]
        if not self.stage.is_first and position_ids is not None:
            length = position_ids.shape[-1]  # hidden states may be a tensor-parallel rank's part of the sequence
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise UserError(
                f"position_ids have shape {tuple(position_ids.shape)}; expected {(batch, length)} or {(1, length)}, "
                f"one position for each token."
            )


@final
class Qwen3ForCausalLM(nn.Module):
    """The backbone with a language-model head on its last stage.

    The weight of a tied head is the embedding's, one parameter in two places.

    Args:
        params: Sizes of the whole model.
        stage: Which part to build.
        feed_forward: Builds each layer's feed-forward block; None for the family's SwiGLU.
    """

    def __init__(
        self, params: Qwen3Params, stage: StageInfo = WHOLE_MODEL, *, feed_forward: FeedForwardFactory | None = None
    ) -> None:
        super().__init__()
        self.backbone = Qwen3Model(params, stage, feed_forward=feed_forward)
        self.lm_head = qwen3_lm_head(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(self, hidden: Tensor, *, position_ids: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            labels: The token to predict at each position [B, L], int64, shifted by the caller; -100 leaves a position
                out. Only the last stage looks at them.

        Returns:
            On the last stage the loss of each token [B, L] in nats (float32, or float64 for a float64 model) if labels
            are given, else the logits [B, L, V]; hidden states [B, L, D] on every other stage.

        Raises:
            UserError: If the input is not what this stage takes, or positions or labels do not fit it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids)
        return hidden_BLD if self.lm_head is None else self.lm_head(hidden_BLD, labels=labels)


def qwen3_lm_head(backbone: Qwen3Model) -> LanguageModelHead | None:
    """The head that belongs to a stage of the backbone: None on all but the last."""
    params, stage = backbone.params, backbone.stage
    if not stage.is_last:
        return None
    head = LanguageModelHead(params.hidden_size, params.vocab_size, init_std=params.initializer_range)
    if params.tie_word_embeddings:
        assert backbone.embedding is not None  # the last stage of a tied model has it
        head.weight = backbone.embedding.get_parameter("weight")
    return head


def _decoder_layer(params: Qwen3Params, index: int, feed_forward: FeedForwardFactory | None) -> DecoderLayer:
    return DecoderLayer(
        params.hidden_size,
        attention=GroupedQueryAttention(
            params.hidden_size,
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            head_dim=params.head_dim,
            qk_norm_eps=params.rms_norm_eps,
            init_std=params.initializer_range,
        ),
        feed_forward=(
            SwiGLU(params.hidden_size, params.intermediate_size, init_std=params.initializer_range)
            if feed_forward is None
            else feed_forward(index)
        ),
        norm_eps=params.rms_norm_eps,
    )
