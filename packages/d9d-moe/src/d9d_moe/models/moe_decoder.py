"""The decoder that sparse families have in common: any attention, and what routers cost beside the hidden states.

Each pipeline stage builds only its own layers, under the names that they have in the whole model.

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
from d9d_moe.layer import MoeFeedForward
from d9d_moe.router_losses import HiddenAndLosses, RouterLosses

Hidden: TypeAlias = Tensor | HiddenAndLosses
"""What passes from layer to layer: with losses, where routers have any."""

Received: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What passes from stage to stage: the same, as a plain tuple, which can be described to any rank."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneSizes:
    """What a backbone has to know, whatever its blocks are.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Size of the hidden states.
        num_layers: Number of decoder layers of the whole model.
        rotary_dim: How many features of a head are rotated; even.
        tie_word_embeddings: Whether a language-model head uses the weight of the token embedding.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Changes the wavelengths for long sequences; None for those of the base.
        rope_length: The longest sequence, for a scaling that depends on it; None for the longest of each call.
        rms_norm_eps: Epsilon of every norm.
        initializer_range: Standard deviation of the initial weights.
        max_position_embeddings: Longest sequence that the model is meant for: positions are below it.
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
    """What a sparse family says about its models; `Qwen3MoeParams` and `DeepseekV3Params` do."""

    @property
    def backbone_sizes(self) -> BackboneSizes:
        """The sizes of the backbone."""
        ...

    @property
    def router_losses(self) -> RouterLosses:
        """What routing costs."""
        ...

    def attention(self, index: int) -> nn.Module:
        """Build the attention of the layer with this index; called as `d9d_modules.DecoderLayer` says."""
        ...

    def feed_forward(self, index: int) -> nn.Module:
        """Build its feed-forward block: a `MoeFeedForward` with these losses, or a dense one."""
        ...


@final
class MoeDecoderLayer(nn.Module):
    """`h = x + attention(norm(x))`, then `h + feed_forward(norm(h))`; losses of the block are added to those before.

    Args:
        hidden_size: Size of the last dim of input and output.
        attention: Called with hidden states [B, L, D], the rotary tables, and `documents_BL` by name where there are
            documents; returns [B, L, D].
        feed_forward: Called with hidden states [B, L, D], a `MoeFeedForward` with `mask_BL` too where there is one;
            returns [B, L, D], or `HiddenAndLosses`.
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
        self, x: Hidden, rotary: RotaryTables, *, documents_BL: Tensor | None = None, mask_BL: Tensor | None = None
    ) -> Hidden:
        """Map hidden states to the same shape and dtype.

        Args:
            x: Hidden states [B, L, D], with what routers before cost where routers cost something.
            rotary: Tables of the positions.
            documents_BL: Which document each position belongs to [B, L], integers; None: each row is one.
            mask_BL: Where there is a token [B, L]; see `MoeFeedForward.forward`.
        """
        x_BLD = x.hidden if isinstance(x, HiddenAndLosses) else x
        documents = {} if documents_BL is None else {"documents_BL": documents_BL}
        attention_BLD = self.attention(self.attention_norm(x_BLD), rotary, **documents)
        normed_BLD, attended_BLD = self.feed_forward_norm(attention_BLD, x_BLD)
        is_masked = mask_BL is not None and isinstance(self.feed_forward, MoeFeedForward)
        y = self.feed_forward(normed_BLD, mask_BL=mask_BL) if is_masked else self.feed_forward(normed_BLD)
        if not isinstance(x, HiddenAndLosses):
            assert not isinstance(y, HiddenAndLosses), "a backbone whose routers have losses carries them"
            return attended_BLD + y
        if isinstance(y, HiddenAndLosses):
            return HiddenAndLosses(attended_BLD + y.hidden, x.losses + y.losses)
        return HiddenAndLosses(attended_BLD + y, x.losses)


@final
class TokenMask(nn.Module):
    """Where the mask of whole rows becomes that of a rank's tokens: tensor-parallel plans name it."""

    def forward(self, mask_BL: Tensor) -> Tensor:
        """The mask [B, L] as it is."""
        return mask_BL


@final
class MoeDecoder(nn.Module):
    """The backbone, or one pipeline stage of it: token embedding, decoder layers, final norm.

    Args:
        params: What the family says.
        stage: Which part to build; the embedding belongs to the first stage, the final norm to the last. A last stage
            whose head is tied has the embedding too, for the head to use: one parameter, on two stages.
    """

    def __init__(self, params: MoeDecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__()
        self.sizes = sizes = params.backbone_sizes
        self.stage = stage
        self.has_losses = params.router_losses.any
        self.joint_balance = (
            JointBalance(params.router_losses) if stage.is_last and params.router_losses.are_joint else None
        )
        self._records = params.router_losses.are_joint
        # A dynamic scaling is for what is beyond.
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
        documents_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
    ) -> Received:
        """Run this stage; collective where experts or the counts of their losses are on several ranks.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later ones what the stage before returned.
            position_ids: Positions [B, L] or [1, L], integer, below `max_position_embeddings` (but with dynamic NTK
                scaling); None counts from 0 in each row. Where tensor-parallel ranks pass on their parts of the
                sequence, later stages cannot count: pass the positions.
            documents_BL: Which document each position belongs to [B, L]; see `d9d_modules.DecoderModel.forward`.
            mask_BL: Where there is a token [B, L], bool or 0 and 1; None for everywhere. Of padding, which attention
                does not look at, experts are not counted, and routing costs nothing. Give it to all stages.

        Returns:
            Hidden states [B, L, D], normalised on the last stage; where routers have losses a tuple of them and of what
            routing costs each token so far [B, L], or before the last stage of a loss over all layers its records.

        Raises:
            UserError: If the input is not what this stage takes, positions or documents do not fit it, or token ids or
                positions are out of range; on an accelerator the device fails for ids instead, later, and for positions
                nothing does.
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
            x = _without_losses(x_BLD, are_records=self._records) if self.has_losses else x_BLD
        mask_BL = None if mask_BL is None else self.token_mask(mask_BL)
        for layer in self.layers.values():
            x = layer(x, rotary, documents_BL=documents_BL, mask_BL=mask_BL)
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
            losses = "a tuple with the routers' losses and " if self.has_losses else ""
            raise UserError(
                f"stage {self.stage.index} got {got}{' with losses' if has_losses else ''}; expected {losses}the "
                f"hidden states of the stage before it, [batch, length, {self.sizes.hidden_size}]."
            )
        batch, length = hidden.shape[:2]
        if position_ids is None and self._max_positions is not None and length > self._max_positions:
            raise UserError(
                f"got rows of {length} tokens; expected at most max_position_embeddings = {self._max_positions}. Split "
                "or truncate longer rows, or raise it."
            )
        if not self.stage.is_first and position_ids is not None:
            length = position_ids.shape[-1]  # hidden states may be a tensor-parallel rank's part of the sequence
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise UserError(
                f"position_ids have shape {tuple(position_ids.shape)}; expected {(batch, length)} or {(1, length)}, "
                f"one position for each token."
            )


def _without_losses(x_BLD: Tensor, *, are_records: bool) -> HiddenAndLosses:
    """Return hidden states with losses of 0, or with one column of zeros to which the records of layers are added."""
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    zeros_BL = x_BLD.new_zeros(x_BLD.shape[:2], dtype=dtype)
    return HiddenAndLosses(x_BLD, zeros_BL.unsqueeze(-1) if are_records else zeros_BL)
