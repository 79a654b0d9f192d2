"""Decoder shared by the dense families, which differ only in their `DecoderParams`.

Each pipeline stage builds only its own layers. Parameter names are the same as in the whole model.

Shape legend: B batch, L length, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_dist.token_ids import check_token_ids
from d9d_modules.attention import GroupedQueryAttention
from d9d_modules.attention_backends import AttentionOptions
from d9d_modules.decoder import DecoderLayer
from d9d_modules.embedding import TokenEmbedding
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.norm import RMSNorm
from d9d_modules.rope import rotary_tables
from d9d_modules.rope_scaling import DynamicNtkScaling, LongRopeScaling
from d9d_modules.swiglu import SwiGLU

FeedForwardFactory: TypeAlias = Callable[[int], nn.Module]
"""Builds the feed-forward block of the layer with the given global index."""

WHOLE_MODEL = StageInfo()
"""Stage of a model without pipeline parallelism."""


@final
class DecoderModel(nn.Module):
    """Backbone, or one pipeline stage of it: token embedding, decoder layers, final norm.

    Args:
        params: Hyperparameters of the whole model.
        stage: Pipeline stage to build. The first stage has the embedding, the last stage the final norm. With weight
            tying the last stage has a copy of the embedding too, for the head.
        feed_forward: Builds each layer's feed-forward block; None for `SwiGLU`.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, feed_forward: FeedForwardFactory | None = None
    ) -> None:
        super().__init__()
        self.params = params
        self.stage = stage
        # Dynamic NTK scaling extends positions beyond max_position_embeddings.
        is_bounded = not isinstance(params.rope_scaling, DynamicNtkScaling)
        self._max_positions = params.max_position_embeddings if is_bounded else None
        self.embedding = (
            TokenEmbedding(params.vocab_size, params.hidden_size, init_std=params.initializer_range)
            if stage.is_first or (stage.is_last and params.tie_word_embeddings)
            else None
        )
        self.layers = nn.ModuleDict(
            {str(index): _decoder_layer(params, index, feed_forward) for index in stage.layers(params.num_layers)}
        )
        self.norm = RMSNorm(params.hidden_size, eps=params.rms_norm_eps) if stage.is_last else None

    def forward(
        self, hidden: Tensor, *, position_ids: Tensor | None = None, document_ids_BL: Tensor | None = None
    ) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer, below `max_position_embeddings` unless dynamic NTK
                scaling is used; None counts from 0 in each row. Pass them explicitly if stages exchange hidden states
                sharded along the sequence (sequence parallelism), because later stages then do not know L.
            document_ids_BL: Document id of each position [B, L], integer, for packed sequences: a position attends only
                within its document. The positions do not restart at document starts. To mask left padding, give it its
                own document id. None: each row is one document.

        Returns:
            Hidden states [B, L, D], after the final norm on the last stage.

        Raises:
            UserError: If `hidden` is not a valid input of this stage, `position_ids` or `document_ids_BL` do not match
                it, or token ids or positions on the CPU are out of range. On accelerators an out-of-range token id
                raises an asynchronous device error, and an out-of-range position is not detected.
        """
        self._check_inputs(hidden, position_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = rotary_tables(
            position_ids,
            head_dim=self.params.head_dim,
            theta=self.params.rope_theta,
            scaling=self.params.rope_scaling,
            length=self.params.rope_length,
            max_positions=self._max_positions,
        )
        x_BLD = self.embedding(hidden) if self.stage.is_first and self.embedding is not None else hidden
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, rotary, document_ids_BL=document_ids_BL)
        return x_BLD if self.norm is None else self.norm(x_BLD)

    @property
    def full_sequence_reason(self) -> str | None:
        """See `d9d_dist.RequiresFullSequence`."""
        scaling = self.params.rope_scaling
        if self.params.rope_length is None and isinstance(scaling, DynamicNtkScaling | LongRopeScaling):
            return (
                f"scales rotary positions by the longest row of a batch ({type(scaling).__name__}; set rope_length to "
                "fix the length)"
            )
        return None

    def _check_inputs(self, hidden: Tensor, position_ids: Tensor | None) -> None:
        got = f"{tuple(hidden.shape)} of {hidden.dtype}"
        if self.stage.is_first:
            if hidden.dim() != 2 or hidden.is_floating_point():
                raise UserError(f"the first stage got {got}; expected token ids [batch, length] of torch.int64.")
            check_token_ids(hidden, self.params.vocab_size, what="token ids")
        elif hidden.dim() != 3 or hidden.shape[-1] != self.params.hidden_size:
            raise UserError(
                f"stage {self.stage.index} got {got}; expected the hidden states of the previous stage, "
                f"[batch, length, {self.params.hidden_size}]."
            )
        batch, length = hidden.shape[:2]
        if position_ids is None and self._max_positions is not None and length > self._max_positions:
            raise UserError(
                f"got rows of {length} tokens; expected at most max_position_embeddings = {self._max_positions}. Split "
                "or truncate longer rows, or raise max_position_embeddings."
            )
        if not self.stage.is_first and position_ids is not None:
            length = position_ids.shape[-1]  # hidden states may be sharded along the sequence
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise UserError(
                f"position_ids have shape {tuple(position_ids.shape)}; expected {(batch, length)} or {(1, length)}, "
                f"one position per token."
            )


@final
class DecoderForCausalLM(nn.Module):
    """Backbone with a language-model head on its last stage.

    With weight tying, the head and the embedding share one parameter.

    Args:
        params: Hyperparameters of the whole model.
        stage: Pipeline stage to build.
        feed_forward: Builds each layer's feed-forward block; None for `SwiGLU`.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, feed_forward: FeedForwardFactory | None = None
    ) -> None:
        super().__init__()
        self.backbone = DecoderModel(params, stage, feed_forward=feed_forward)
        self.lm_head = decoder_lm_head(self.backbone) if stage.is_last else None

    @property
    def layers(self) -> nn.ModuleDict:
        """Decoder layers of this stage, keyed by their global index."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            document_ids_BL: Document id of each position [B, L], integer; see `DecoderModel.forward`.
            labels: Token to predict at each position [B, L], int64, already shifted; -100 ignores a position. Used only
                on the last stage.

        Returns:
            On the last stage, the loss of each token [B, L] in nats (float32, or float64 for a float64 model) if labels
            are given, else the logits [B, L, V]. On other stages, hidden states [B, L, D].

        Raises:
            UserError: If `hidden` is not a valid input of this stage, or another argument does not match it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return hidden_BLD if self.lm_head is None else self.lm_head(hidden_BLD, labels=labels)


def decoder_lm_head(backbone: DecoderModel) -> LanguageModelHead:
    """Build the language-model head of a last stage; with weight tying it shares the embedding's parameter."""
    params = backbone.params
    head = LanguageModelHead(params.hidden_size, params.vocab_size, init_std=params.initializer_range)
    if params.tie_word_embeddings:
        assert backbone.embedding is not None  # the last stage has it if weights are tied
        head.weight = backbone.embedding.get_parameter("weight")
    return head


def _decoder_layer(params: DecoderParams, index: int, feed_forward: FeedForwardFactory | None) -> DecoderLayer:
    return DecoderLayer(
        params.hidden_size,
        attention=GroupedQueryAttention(
            params.hidden_size,
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            head_dim=params.head_dim,
            qk_norm_eps=params.rms_norm_eps if params.has_qk_norm else None,
            options=AttentionOptions(window=params.window(index)),
            init_std=params.initializer_range,
        ),
        feed_forward=(
            SwiGLU(params.hidden_size, params.intermediate_size, init_std=params.initializer_range)
            if feed_forward is None
            else feed_forward(index)
        ),
        norm_eps=params.rms_norm_eps,
    )
