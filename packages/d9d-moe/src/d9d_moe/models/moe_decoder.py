"""Decoder backbone of the sparse families: accepts any attention, and carries router losses with the hidden states.

Each pipeline stage builds only its own layers, with their names in the whole model.

Shape legend: B batch, L length, D hidden size.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from d9d_dist import StageInfo, UserError, check_token_ids
from d9d_modules import (
    WHOLE_MODEL,
    DynamicNtkScaling,
    RMSNorm,
    RopeScaling,
    RotaryTables,
    TokenEmbedding,
    rotary_tables,
)
from d9d_moe.joint_balance import JointBalance
from d9d_moe.layer import MoELayer
from d9d_moe.router_losses import HiddenAndLosses, RouterLosses

Hidden: TypeAlias = Tensor | HiddenAndLosses
"""Input and output of a layer: hidden states, or `HiddenAndLosses` if there are router losses."""

Received: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Input and output of a stage: as `Hidden`, but a plain tuple, which pipeline stages can send."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneSizes:
    """Parameters of the backbone that do not depend on the attention and feed-forward blocks.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        rotary_dim: Number of features per head that RoPE rotates; even.
        tie_word_embeddings: Tie the weight of the language-model head to the token embedding.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: RoPE scaling for long sequences; None for no scaling.
        rope_length: Sequence length for a scaling that depends on it; None for the longest sequence of each call.
        rms_norm_eps: Epsilon of all norms.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Longest supported sequence; positions must be smaller.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    rotary_dim: int
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_length: int | None
    rms_norm_eps: float
    initializer_range: float
    max_position_embeddings: int


class MoeDecoderParams(Protocol):
    """Parameters of a sparse decoder, as implemented by `Qwen3MoeParams` and `DeepseekV3Params`."""

    @property
    def backbone_sizes(self) -> BackboneSizes:
        """Parameters of the backbone."""
        ...

    @property
    def router_losses(self) -> RouterLosses:
        """Auxiliary losses of the routers."""
        ...

    def attention(self, index: int) -> nn.Module:
        """Build the attention of layer `index`; for its call signature see `d9d_modules.DecoderLayer`."""
        ...

    def feed_forward(self, index: int) -> nn.Module:
        """Build the feed-forward block of layer `index`: a `MoELayer` with `router_losses`, or a dense block."""
        ...


@final
class MoeDecoderLayer(nn.Module):
    """Pre-norm decoder layer: `h = x + attention(norm(x))`, then `h + feed_forward(norm(h))`.

    Router losses of the feed-forward block are added to the losses of the layers before.

    Args:
        hidden_size: Size of the last dim of input and output.
        attention: Called with the hidden states [B, L, D], the rotary tables, and the keyword argument
            `document_ids_BL` if there are documents; returns [B, L, D].
        feed_forward: Called with the hidden states [B, L, D]; a `MoELayer` also gets the keyword argument
            `mask_BL` if there is a mask. Returns [B, L, D], or `HiddenAndLosses`.
        norm_eps: Epsilon of both RMS norms.
    """

    def __init__(
        self, hidden_size: int, *, attention: nn.Module, feed_forward: nn.Module, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, eps=norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, eps=norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x: Hidden, rotary: RotaryTables, *, document_ids_BL: Tensor | None = None, mask_BL: Tensor | None = None
    ) -> Hidden:
        """Run the layer; the output hidden states have the shape and dtype of the input.

        Args:
            x: Hidden states [B, L, D]; `HiddenAndLosses` if the model has router losses.
            rotary: Rotary tables of the positions.
            document_ids_BL: Document id of each position [B, L], integer; None if each row is one document.
            mask_BL: Token mask [B, L]; see `MoELayer.forward`.
        """
        x_BLD = x.hidden if isinstance(x, HiddenAndLosses) else x
        documents = {} if document_ids_BL is None else {"document_ids_BL": document_ids_BL}
        attention_BLD = self.attention(self.attention_norm(x_BLD), rotary, **documents)
        normed_BLD, attended_BLD = self.feed_forward_norm(attention_BLD, x_BLD)
        is_masked = mask_BL is not None and isinstance(self.feed_forward, MoELayer)
        y = self.feed_forward(normed_BLD, mask_BL=mask_BL) if is_masked else self.feed_forward(normed_BLD)
        if not isinstance(x, HiddenAndLosses):
            assert not isinstance(y, HiddenAndLosses), "router losses need an input of HiddenAndLosses"
            return attended_BLD + y
        if isinstance(y, HiddenAndLosses):
            return HiddenAndLosses(attended_BLD + y.hidden, x.losses + y.losses)
        return HiddenAndLosses(attended_BLD + y, x.losses)


@final
class TokenMask(nn.Module):
    """Identity at which a tensor-parallel plan splits the token mask along the sequence."""

    def forward(self, mask_BL: Tensor) -> Tensor:
        """Return the mask [B, L] unchanged."""
        return mask_BL


@final
class MoeDecoder(nn.Module):
    """Backbone, or one pipeline stage of it: token embedding, decoder layers, final norm.

    Args:
        params: Parameters of the model.
        stage: Pipeline stage to build. The first stage has the embedding, the last stage the final norm. With weight
            tying the last stage has the embedding too, for its head.
    """

    def __init__(self, params: MoeDecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__()
        self.sizes = sizes = params.backbone_sizes
        self.stage = stage
        self.has_losses = params.router_losses.any
        self.joint_balance = (
            JointBalance(params.router_losses) if stage.is_last and params.router_losses.are_joint else None
        )
        self._has_records = params.router_losses.are_joint
        # Dynamic NTK scaling supports positions beyond max_position_embeddings.
        is_bounded = not isinstance(sizes.rope_scaling, DynamicNtkScaling)
        self._max_positions = sizes.max_position_embeddings if is_bounded else None
        self.embedding = (
            TokenEmbedding(sizes.vocab_size, sizes.hidden_size, init_std=sizes.initializer_range)
            if stage.is_first or (stage.is_last and sizes.tie_word_embeddings)
            else None
        )
        self.layers = nn.ModuleDict(
            {
                str(index): MoeDecoderLayer(
                    sizes.hidden_size,
                    attention=params.attention(index),
                    feed_forward=params.feed_forward(index),
                    norm_eps=sizes.rms_norm_eps,
                )
                for index in stage.layers(sizes.num_layers)
            }
        )
        self.norm = RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps) if stage.is_last else None
        self.token_mask = TokenMask()

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
    ) -> Received:
        """Run this stage.

        Collective if the experts, or the counts for the balance loss, are distributed over ranks.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later stages the output of the previous stage.
            position_ids: Positions [B, L] or [1, L], integer, below `max_position_embeddings` except with dynamic NTK
                scaling; None for 0 to L - 1 in each row. With pipeline stages that send sequence-parallel parts of the
                hidden states, pass the positions: later stages cannot infer L.
            document_ids_BL: Document id of each position [B, L]; see `d9d_modules.DecoderModel.forward`.
            mask_BL: Token mask [B, L], bool or 0 and 1: true for tokens, false for padding; None if there is no
                padding. Padding is not counted, and its router losses are 0. The mask does not affect attention. Pass
                it to all stages.

        Returns:
            Hidden states [B, L, D], after the final norm on the last stage. With router losses: a tuple of the hidden
            states and the router losses of each token so far [B, L]; with a loss over all layers, stages before the
            last one return its records [B, L, R] instead.

        Raises:
            UserError: If the input is invalid for this stage, or positions or documents do not match its shape. On a
                CPU also if token ids or positions are out of range. On an accelerator, token ids out of range fail
                later on the device, and positions out of range are not detected.
        """
        received = hidden[0] if isinstance(hidden, tuple) else hidden
        self._check_inputs(received, position_ids, has_losses=isinstance(hidden, tuple))
        if position_ids is None:
            position_ids = torch.arange(received.shape[1], device=received.device).unsqueeze(0)
        rotary = rotary_tables(
            position_ids,
            head_dim=self.sizes.rotary_dim,
            theta=self.sizes.rope_theta,
            scaling=self.sizes.rope_scaling,
            length=self.sizes.rope_length,
            max_positions=self._max_positions,
        )
        x: Hidden = HiddenAndLosses(*hidden) if isinstance(hidden, tuple) else hidden
        if self.stage.is_first:
            assert self.embedding is not None
            x_BLD = self.embedding(received)
            x = _with_zero_losses(x_BLD, has_records=self._has_records) if self.has_losses else x_BLD
        mask_BL = None if mask_BL is None else self.token_mask(mask_BL)
        for layer in self.layers.values():
            x = layer(x, rotary, document_ids_BL=document_ids_BL, mask_BL=mask_BL)
        if not isinstance(x, HiddenAndLosses):
            return x if self.norm is None else self.norm(x)
        losses = x.losses if self.joint_balance is None else self.joint_balance(x.losses)
        return (x.hidden if self.norm is None else self.norm(x.hidden)), losses

    def _check_inputs(self, hidden: Tensor, position_ids: Tensor | None, *, has_losses: bool) -> None:
        got = f"{tuple(hidden.shape)} of {hidden.dtype}"
        if self.stage.is_first:
            if hidden.dim() != 2 or hidden.is_floating_point():
                raise UserError(f"the first stage got {got}; expected token ids [batch, length] of torch.int64.")
            check_token_ids(hidden, self.sizes.vocab_size, what="token ids")
        elif hidden.dim() != 3 or hidden.shape[-1] != self.sizes.hidden_size or has_losses != self.has_losses:
            losses = ", in a tuple with the router losses" if self.has_losses else ""
            raise UserError(
                f"stage {self.stage.index} got {got}{' with router losses' if has_losses else ''}; expected the hidden "
                f"states of the previous stage, [batch, length, {self.sizes.hidden_size}]{losses}."
            )
        batch, length = hidden.shape[:2]
        if position_ids is None and self._max_positions is not None and length > self._max_positions:
            raise UserError(
                f"got rows of {length} tokens; expected at most max_position_embeddings = {self._max_positions}. Split "
                "or truncate longer rows, or raise max_position_embeddings."
            )
        if not self.stage.is_first and position_ids is not None:
            length = position_ids.shape[-1]  # hidden states may be a sequence-parallel part
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise UserError(
                f"position_ids have shape {tuple(position_ids.shape)}; expected {(batch, length)} or {(1, length)}, "
                f"one position per token."
            )


def _with_zero_losses(x_BLD: Tensor, *, has_records: bool) -> HiddenAndLosses:
    """Return hidden states with router losses of 0 [B, L], or with zeros [B, L, 1] to which records broadcast."""
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    zeros_BL = x_BLD.new_zeros(x_BLD.shape[:2], dtype=dtype)
    return HiddenAndLosses(x_BLD, zeros_BL.unsqueeze(-1) if has_records else zeros_BL)
