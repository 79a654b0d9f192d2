"""Decoders with one output per row: sequence classification and text embedding.

The heads are on the last stage. They pool whole rows, so they do not support context parallelism.

Shape legend: B batch, L length, D hidden size, C classes, E embedding size.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_dist.token_ids import check_token_ids
from d9d_modules.cross_entropy import IGNORED_LABEL
from d9d_modules.models.decoder_model import WHOLE_MODEL, DecoderModel
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.pooling import Pooling
from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead


@final
class DecoderForClassification(nn.Module):
    """Backbone with a `ClassificationHead` on its last stage.

    Args:
        params: Hyperparameters of the whole model.
        stage: Pipeline stage to build.
        num_classes: Number of classes.
        pooling: Pooling method.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, num_classes: int, pooling: Pooling = "last"
    ) -> None:
        super().__init__()
        self.backbone = _pooled_backbone(params, stage)
        self.head = (
            ClassificationHead(params.hidden_size, num_classes, pooling=pooling, init_std=params.initializer_range)
            if stage.is_last
            else None
        )

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
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            document_ids_BL: Document id of each position [B, L]; see `DecoderModel.forward`. With left padding, pass
                the token mask here as well, so that tokens do not attend to padding.
            mask_BL: Token mask [B, L], bool or 0 and 1; None if there is no padding.
            labels: Class of each row [B], int64; -100 ignores a row. Used only on the last stage.

        Returns:
            On the last stage, the loss of each row [B] in nats (float32, or float64 for a float64 model) if labels are
            given, else the logits [B, C]. On other stages, hidden states [B, L, D].

        Raises:
            UserError: If `hidden` is not a valid input of this stage, or another argument does not match it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return hidden_BLD if self.head is None else classify(self.head, hidden_BLD, mask_BL=mask_BL, labels_B=labels)


@final
class DecoderForEmbedding(nn.Module):
    """Backbone with an `EmbeddingHead` on its last stage. The task computes the loss of the embeddings.

    Args:
        params: Hyperparameters of the whole model.
        stage: Pipeline stage to build.
        embedding_size: Size of the embeddings; None for the hidden size without a projection.
        pooling: Pooling method.
        normalize: If True, scale embeddings to unit L2 norm.
    """

    def __init__(
        self,
        params: DecoderParams,
        stage: StageInfo = WHOLE_MODEL,
        *,
        embedding_size: int | None = None,
        pooling: Pooling = "last",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = _pooled_backbone(params, stage)
        self.head = (
            EmbeddingHead(
                params.hidden_size,
                embedding_size,
                pooling=pooling,
                normalize=normalize,
                init_std=params.initializer_range,
            )
            if stage.is_last
            else None
        )

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
        mask_BL: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            document_ids_BL: Document id of each position [B, L]; see `DecoderForClassification.forward`.
            mask_BL: Token mask [B, L], bool or 0 and 1; None if there is no padding.

        Returns:
            On the last stage, the embedding of each row [B, E], in at least float32 if normalized. On other stages,
            hidden states [B, L, D].

        Raises:
            UserError: If `hidden` is not a valid input of this stage, or another argument does not match it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        return hidden_BLD if self.head is None else self.head(hidden_BLD, mask_BL=mask_BL)


def classify(
    head: ClassificationHead, hidden_BLD: Tensor, *, mask_BL: Tensor | None, labels_B: Tensor | None
) -> Tensor:
    """Return the logits [B, C] of a classification head, or its losses [B] if labels [B] are given.

    Raises:
        UserError: If the shape of mask or labels does not match, or a label on the CPU is out of range.
    """
    logits_BC = head(hidden_BLD, mask_BL=mask_BL)
    if labels_B is None:
        return logits_BC
    if labels_B.shape != logits_BC.shape[:1]:
        raise UserError(
            f"class labels have shape {tuple(labels_B.shape)}; expected {tuple(logits_BC.shape[:1])}, one class per "
            "row."
        )
    check_token_ids(labels_B, logits_BC.shape[1], what="class labels", ignored=IGNORED_LABEL)
    wide_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    return F.cross_entropy(wide_BC, labels_B, reduction="none", ignore_index=IGNORED_LABEL)


def drop_tied_embedding(backbone: DecoderModel) -> None:
    """Remove the embedding from a last stage that needs none, because it has no tied language-model head."""
    if not backbone.stage.is_first:
        backbone.embedding = None


def _pooled_backbone(params: DecoderParams, stage: StageInfo) -> DecoderModel:
    backbone = DecoderModel(params, stage)
    drop_tied_embedding(backbone)
    return backbone
