"""Decoder backbone of all families, which differ only in their `DecoderParams`.

Each pipeline stage builds only its own layers. Parameter names are the same as in the whole model.

Shape legend: B batch, L length, D hidden size, R entries of a record.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_dist.token_ids import check_token_ids
from d9d_modules.decoder import DecoderLayer, Hidden, HiddenAndLosses
from d9d_modules.embedding import TokenEmbedding
from d9d_modules.models.decoder_params import DecoderParams, Rope
from d9d_modules.rope import RotaryTables, rotary_tables
from d9d_modules.rope_scaling import DynamicNtkScaling, LongRopeScaling

Received: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Input and output of a stage: as `Hidden`, but a plain tuple, which pipeline stages can send."""

WHOLE_MODEL = StageInfo()
"""Stage of a model without pipeline parallelism."""


@final
class DecoderModel(nn.Module):
    """Decoder backbone, or one of its pipeline stages: token embedding, decoder layers, final norm.

    Args:
        stage: Pipeline stage to build. The first stage has the embedding, the last stage the final norm. With weight
            tying the last stage also has a copy of the embedding, for the head.

    Attributes:
        token_mask: Identity at which a tensor-parallel plan splits the token mask along the sequence.
        all_losses: Identity at which a tensor-parallel plan gathers the auxiliary losses along the sequence.
    """

    def __init__(self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
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
        self.embedding_norm = params.embedding_norm() if stage.is_first else None
        indices = stage.layers(params.num_layers, virtual_after=params.head_layers)
        self.layers = nn.ModuleDict({str(index): build_layer(params, index) for index in indices})
        self.norm = params.norm() if stage.is_last else None
        self.auxiliary_losses = losses = params.auxiliary_losses
        self.total_losses = losses.total() if stage.is_last and losses is not None and losses.total else None
        self.token_mask = nn.Identity()
        self.all_losses = nn.Identity()

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        expert_indices: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Received:
        """Run this stage. Issues collectives only if the feed-forward blocks or their auxiliary losses do.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later stages the output of the previous stage.
            position_ids: Positions [B, L] or [1, L], integer, below `max_position_embeddings` unless dynamic NTK
                scaling is used; None counts from 0 in each row. Required if stages exchange hidden states sharded along
                the sequence (sequence parallelism), because later stages then do not know L.
            document_ids_BL: Document id of each position [B, L], integer, for packed sequences: a position attends only
                within its document. Positions do not restart at document starts. To mask left padding, give the padding
                its own document id. None: each row is one document.
            mask_BL: Token mask [B, L], bool or 0 and 1; None if there is no padding. Padding is excluded from the
                tokens per expert and has auxiliary loss 0. The mask does not affect attention. Pass it to all stages.
            expert_indices: Recorded experts of each token in each layer of the whole model [B, L, layers, A], integer,
                to use instead of the routers' choice. The router chooses where an index is below 0; indices of layers
                without experts are unused. None: all routers choose. Pass them to all stages.
            attention_mask: Boolean mask [B, L, L] or [1, L, L], True where a query (dim 1) attends to a key (dim 2),
                such as a prefix-LM mask; see `GroupedQueryAttention.forward`. Pass it to all stages.

        Returns:
            Hidden states [B, L, D], after the final norm on the last stage. With auxiliary losses: a tuple of the
            hidden states and the losses of each token so far [B, L]. With `AuxiliaryLosses.total`, stages before the
            last one return the records [B, L, R] instead of losses.

        Raises:
            UserError: If an argument is not valid for this stage, or token ids or positions on the CPU are out of
                range. On accelerators an out-of-range token id raises an asynchronous device error, and an out-of-range
                position is not detected.
        """
        received = hidden[0] if isinstance(hidden, tuple) else hidden
        self._check_inputs(received, position_ids, has_losses=isinstance(hidden, tuple))
        if position_ids is None:
            position_ids = torch.arange(received.shape[1], device=received.device).unsqueeze(0)
        ropes = {name: self.params.rope(int(name)) for name in self.layers}
        rotary = {rope: self.rotary_tables(position_ids, rope) for rope in dict.fromkeys(ropes.values())}
        x: Hidden = HiddenAndLosses(*hidden) if isinstance(hidden, tuple) else hidden
        if self.stage.is_first:
            assert self.embedding is not None
            x_BLD = self.scaled(self.embedding(received))
            x = self._with_zero_losses(x_BLD if self.embedding_norm is None else self.embedding_norm(x_BLD))
        mask_BL = None if mask_BL is None else self.token_mask(mask_BL)
        experts = [None] * self.params.num_layers if expert_indices is None else self._of_layers(expert_indices)
        for name, layer in self.layers.items():
            x = layer(
                x,
                rotary[ropes[name]],
                document_ids_BL=document_ids_BL,
                mask_BL=mask_BL,
                expert_indices=experts[int(name)],
                attention_mask=attention_mask,
            )
        return self._output(x)

    def _output(self, x: Hidden) -> Received:
        """Apply the final norm, and convert records to losses, on the last stage."""
        x_BLD, losses = x if isinstance(x, HiddenAndLosses) else (x, None)
        x_BLD = x_BLD if self.norm is None else self.norm(x_BLD)
        if losses is None:
            return x_BLD
        losses = losses if self.total_losses is None else self.total_losses(losses)
        return x_BLD, self.all_losses(losses) if self.stage.is_last else losses

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

    def _of_layers(self, expert_indices: Tensor) -> Sequence[Tensor]:
        """Return the recorded experts of each layer [B, L, A], for this rank's part of the sequence."""
        if expert_indices.dim() != 4 or expert_indices.shape[2] != self.params.num_layers:
            raise UserError(
                f"expert_indices have shape {tuple(expert_indices.shape)}; expected [batch, length, layers, top_k] "
                f"with all {self.params.num_layers} layers of the whole model."
            )
        return self.token_mask(expert_indices).unbind(2)

    def rotary_tables(self, position_ids: Tensor, rope: Rope) -> RotaryTables:
        """Return the rotary tables of positions [B, L] or [1, L]; see `rotary_tables`."""
        return rotary_tables(
            position_ids,
            head_dim=self.params.rotated_features,
            theta=rope.theta,
            scaling=rope.scaling,
            length=self.params.rope_length,
            max_positions=self._max_positions,
        )

    def scaled(self, x_BLD: Tensor) -> Tensor:
        """Return embeddings [B, L, D] times `embedding_scale`."""
        scale = self.params.embedding_scale
        if scale == 1.0:
            return x_BLD
        # As in transformers, round the factor to float32, then to the dtype of the embeddings.
        return x_BLD * torch.full((), scale, dtype=torch.float32, device=x_BLD.device).to(x_BLD.dtype)

    def _with_zero_losses(self, x_BLD: Tensor) -> Hidden:
        """Add zero losses [B, L] if the model has auxiliary losses, or zero records [B, L, 1], which broadcast."""
        if self.auxiliary_losses is None:
            return x_BLD
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        zeros_BL = x_BLD.new_zeros(x_BLD.shape[:2], dtype=dtype)
        return HiddenAndLosses(x_BLD, zeros_BL.unsqueeze(-1) if self.auxiliary_losses.total else zeros_BL)

    def _check_inputs(self, hidden: Tensor, position_ids: Tensor | None, *, has_losses: bool) -> None:
        got = f"{tuple(hidden.shape)} of {hidden.dtype}"
        expected, size = self.auxiliary_losses, self.params.hidden_size
        if self.stage.is_first:
            if hidden.dim() != 2 or hidden.is_floating_point():
                raise UserError(f"the first stage got {got}; expected token ids [batch, length] of torch.int64.")
            check_token_ids(hidden, self.params.vocab_size, what="token ids")
        elif hidden.dim() != 3 or hidden.shape[-1] != size or has_losses is (expected is None):
            raise UserError(
                f"stage {self.stage.index} got {got}{', in a tuple' if has_losses else ''}; expected the hidden states "
                f"of the previous stage, [batch, length, {size}]"
                f"{'' if expected is None else f', in a tuple with the {expected.name}'}."
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


def build_layer(params: DecoderParams, index: int) -> DecoderLayer:
    """Build the decoder layer with this global index."""
    return DecoderLayer(
        params.hidden_size,
        attention=params.mixer(index),
        feed_forward=params.feed_forward(index),
        norm=params.norm,
        attention_norm=params.has_attention_norm(index),
        sandwich_norms=params.sandwich_norms,
    )
