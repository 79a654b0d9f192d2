"""Decoder with layers for multi-token prediction (MTP): "DeepSeek-V3" (arXiv:2412.19437), section 2.2.

At position i, MTP layer k (from 0) predicts token i + k + 2 from the hidden states of the previous layer and the
embedding of token i + k + 1. Each MTP layer has its own decoder layer; all share the model's embedding and head.

Shape legend: B batch, L length, D hidden size, K number of MTP layers.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_modules.attention_backends.visibility import check_documents
from d9d_modules.cross_entropy import IGNORED_LABEL
from d9d_modules.decoder import HiddenAndLosses
from d9d_modules.embedding import TokenEmbedding
from d9d_modules.linear import Linear
from d9d_modules.lm_head import LanguageModelHead, Scores
from d9d_modules.models.decoder_heads import HeadedDecoder, decoder_lm_head
from d9d_modules.models.decoder_hugging_face import FeedForwardMapper, decoder_layer_from_hugging_face
from d9d_modules.models.decoder_model import WHOLE_MODEL, Received, build_layer
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.rope import RotaryTables
from d9d_state import StateMapper, parallel, rename, scope


@final
class MtpLayer(nn.Module):
    """MTP layer: `norm(block(projection([embedding_norm(e), hidden_norm(h)])))`, equations 21 and 22.

    `index` is the global index of the block; MTP blocks come after the layers of the model.
    """

    def __init__(self, params: DecoderParams, index: int) -> None:
        super().__init__()
        size = params.hidden_size
        self.embedding_norm, self.hidden_norm, self.norm = params.norm(), params.norm(), params.norm()
        self.projection = Linear(2 * size, size, init_std=params.initializer_range)
        self.block = build_layer(params, index)
        self.has_losses = params.auxiliary_losses is not None

    def forward(
        self,
        embedded_BLD: Tensor,
        hidden_BLD: Tensor,
        rotary: RotaryTables,
        *,
        document_ids_BL: Tensor | None,
        mask_BL: Tensor | None,
        attention_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [B, L, D] after the norm, and the auxiliary losses of the block [B, L], if any."""
        both = torch.cat([self.embedding_norm(embedded_BLD), self.hidden_norm(hidden_BLD)], dim=-1)
        x_BLD = self.projection(both)
        zeros_BL = x_BLD.new_zeros(x_BLD.shape[:2], dtype=torch.promote_types(x_BLD.dtype, torch.float32))
        x = HiddenAndLosses(x_BLD, zeros_BL) if self.has_losses else x_BLD
        y = self.block(x, rotary, document_ids_BL=document_ids_BL, mask_BL=mask_BL, attention_mask=attention_mask)
        y_BLD, losses_BL = y if isinstance(y, HiddenAndLosses) else (y, None)
        return self.norm(y_BLD), losses_BL


@final
class DecoderWithMtp(HeadedDecoder):
    """Backbone with a language-model head and MTP layers on its last stage, which has a copy of the embedding.

    Args:
        num_mtp_layers: Number of MTP layers K.
        mtp_loss_weight: Weight of the mean of the K losses, which is added to the loss (equation 25; 0.3 for most of
            the training of DeepSeek-V3, then 0.1).

    Raises:
        UserError: If there is no MTP layer, the weight is negative, or the model has auxiliary losses over all layers.
    """

    lm_head: LanguageModelHead | None

    def __init__(
        self,
        params: DecoderParams,
        stage: StageInfo = WHOLE_MODEL,
        *,
        num_mtp_layers: int = 1,
        mtp_loss_weight: float = 0.3,
    ) -> None:
        super().__init__(params, stage, {"lm_head": decoder_lm_head})
        if num_mtp_layers < 1 or mtp_loss_weight < 0:
            raise UserError(
                f"num_mtp_layers = {num_mtp_layers}, mtp_loss_weight = {mtp_loss_weight}; expected a number of layers "
                "above 0 and a weight of 0 or above. Use DecoderForCausalLM for a model without MTP."
            )
        if params.auxiliary_losses is not None and params.auxiliary_losses.total is not None:
            raise UserError(
                f"the model has {params.auxiliary_losses.name} over all layers, which MTP does not support; expected "
                'losses of single layers, such as RouterLosses(definition="per_layer").'
            )
        self.num_mtp_layers, self.mtp_loss_weight = num_mtp_layers, mtp_loss_weight
        if stage.is_last and self.backbone.embedding is None:
            self.backbone.embedding = TokenEmbedding(
                params.vocab_size, params.hidden_size, init_std=params.initializer_range
            )
        # A second name for the embedding declares to a pipeline that the first and the last stage share it.
        self.mtp_embedding = self.backbone.embedding if stage.is_last else None
        indices = range(params.num_layers, params.num_layers + num_mtp_layers) if stage.is_last else ()
        self.mtp = nn.ModuleList(MtpLayer(params, index) for index in indices)

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        expert_indices: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | Mapping[str, Tensor] | None = None,
        scores: Scores = False,
        mtp_ids_BLK: Tensor | None = None,
        mtp_labels_BLK: Tensor | None = None,
    ) -> Received | dict[str, Tensor]:
        """Run this stage; see `HeadedDecoder.forward` for the other arguments and the result.

        With labels, the loss of each token includes its MTP losses. `scores` exclude them, and routers of MTP layers
        always choose their experts. `mtp_ids_BLK` and `mtp_labels_BLK` [B, L, K] are the input tokens and the labels of
        the MTP layers, from `mtp_targets`; positions without a loss have the label -100. Both are required with labels
        in training mode. In evaluation mode, the loss does not include MTP if both are None.

        Raises:
            UserError: See `HeadedDecoder.forward`; also if an MTP argument is missing or has another shape.
        """
        x = self.backbone(
            hidden,
            position_ids=position_ids,
            document_ids_BL=document_ids_BL,
            mask_BL=mask_BL,
            expert_indices=expert_indices,
            attention_mask=attention_mask,
        )
        if not self.backbone.stage.is_last:
            return x
        output = self.apply_heads(x, mask_BL=mask_BL, labels=labels, scores=scores)
        is_main = mtp_ids_BLK is None and mtp_labels_BLK is None and not self.training
        if labels is None or scores or is_main:
            return output
        assert isinstance(labels, Tensor), "the model has one head"
        assert isinstance(output, Tensor)
        ids = self._checked("mtp_ids_BLK", mtp_ids_BLK, labels)
        mtp_labels = self._checked("mtp_labels_BLK", mtp_labels_BLK, labels)
        if position_ids is None:
            position_ids = torch.arange(labels.shape[1], device=labels.device).unsqueeze(0)
        masks = {
            "document_ids_BL": document_ids_BL,
            "mask_BL": None if mask_BL is None else self.backbone.token_mask(mask_BL),
            "attention_mask": attention_mask,
        }
        hidden_BLD = x[0] if isinstance(x, tuple) else x
        return output + self._mtp_loss(hidden_BLD, ids, mtp_labels, position_ids, masks)

    def _mtp_loss(
        self,
        hidden_BLD: Tensor,
        ids_BLK: Tensor,
        labels_BLK: Tensor,
        position_ids: Tensor,
        masks: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Compute the weighted mean of the losses of the MTP layers for each position [B, L]."""
        assert self.lm_head is not None
        assert self.mtp_embedding is not None
        losses: list[Tensor] = []
        for depth, layer in enumerate(self.mtp):
            embedded_BLD = self.backbone.scaled(self.mtp_embedding(ids_BLK[..., depth]))
            rope = self.backbone.params.rope(self.backbone.params.num_layers + depth)
            rotary = self.backbone.rotary_tables(position_ids, rope)
            hidden_BLD, auxiliary_BL = layer(embedded_BLD, hidden_BLD, rotary, **masks)
            labels_BL = labels_BLK[..., depth]
            losses.append(self.lm_head(hidden_BLD, labels=labels_BL))
            if auxiliary_BL is not None:
                losses.append(self.backbone.all_losses(auxiliary_BL).masked_fill(labels_BL == IGNORED_LABEL, 0.0))
        return sum(losses[1:], losses[0]) * (self.mtp_loss_weight / self.num_mtp_layers)

    def _checked(self, name: str, given: Tensor | None, labels_BL: Tensor) -> Tensor:
        expected = (*labels_BL.shape, self.num_mtp_layers)
        if given is None or given.shape != expected:
            got = None if given is None else tuple(given.shape)
            raise UserError(f"got {name} of shape {got}; expected {expected}: use mtp_targets.")
        return given


def mtp_targets(
    input_ids_BL: Tensor, labels_BL: Tensor, document_ids_BL: Tensor | None = None, *, num_mtp_layers: int = 1
) -> tuple[Tensor, Tensor]:
    """Return input tokens and labels of the MTP layers, both [B, L, K], for whole rows.

    At position i, layer k (from 0) receives token i + k + 1 and predicts the label of position i + k + 1. Where that
    position is beyond the row or in another document, the token is 0 and the label -100. With context parallelism,
    split the results like the labels, by `ContextSplit`.

    Raises:
        UserError: If the arguments do not have the same shape, or the document ids are not integers.
    """
    if input_ids_BL.shape != labels_BL.shape:
        raise UserError(
            f"got input_ids_BL of shape {tuple(input_ids_BL.shape)} and labels_BL of shape {tuple(labels_BL.shape)}; "
            "expected the same shape. Pass whole rows of both."
        )
    check_documents(document_ids_BL, labels_BL.shape)
    ids, labels = [], []
    for shift in range(1, num_mtp_layers + 1):
        inside_BL = torch.ones_like(labels_BL[:, shift:], dtype=torch.bool)
        if document_ids_BL is not None:
            inside_BL = document_ids_BL[:, shift:] == document_ids_BL[:, :-shift]
        inside_BL = F.pad(inside_BL, (0, shift), value=False)[:, : labels_BL.shape[1]]
        ids.append(input_ids_BL.roll(-shift, dims=1).masked_fill(~inside_BL, 0))
        labels.append(labels_BL.roll(-shift, dims=1).masked_fill(~inside_BL, IGNORED_LABEL))
    return torch.stack(ids, dim=-1), torch.stack(labels, dim=-1)


DEEPSEEK_MTP: Mapping[str, str] = {
    "block.": "model.layers.{index}.",
    "embedding_norm.": "model.layers.{index}.enorm.",
    "hidden_norm.": "model.layers.{index}.hnorm.",
    "projection.": "model.layers.{index}.eh_proj.",
    "norm.": "model.layers.{index}.shared_head.norm.",
}
"""Checkpoint prefixes of the weights of an MTP layer of DeepSeek-V3 and GLM-4.5, by their prefixes in `MtpLayer`.

`{index}` is the global index of the block, and `{depth}` the index of the MTP layer. Released files contain copies of
`embed_tokens` and `shared_head.head`, which the mapper does not read: drop these copies.
"""

QWEN_MTP: Mapping[str, str] = {
    "block.": "mtp.layers.{depth}.",
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "projection.": "mtp.fc.",
    "norm.": "mtp.norm.",
}
"""Prefixes of the MTP layer of Qwen3-Next and Qwen3.5; see `DEEPSEEK_MTP`."""


def mtp_from_hugging_face(
    params: DecoderParams,
    names: Mapping[str, str] = DEEPSEEK_MTP,
    *,
    num_mtp_layers: int = 1,
    feed_forward: FeedForwardMapper | None = None,
) -> StateMapper:
    """Build the mapper of the MTP layers of a `DecoderWithMtp`; combine it with the rest of the model by `parallel`.

    `feed_forward` has the same meaning as in `decoder_from_hugging_face`.
    """

    def layer(depth: int) -> StateMapper:
        index = params.num_layers + depth
        block = decoder_layer_from_hugging_face(params, index, feed_forward=feed_forward)
        return parallel(
            *(
                scope(
                    theirs.format(index=index, depth=depth),
                    f"mtp.{depth}.{ours}",
                    block if ours == "block." else rename("weight", "weight"),
                )
                for ours, theirs in names.items()
            )
        )

    return parallel(*(layer(depth) for depth in range(num_mtp_layers)))
