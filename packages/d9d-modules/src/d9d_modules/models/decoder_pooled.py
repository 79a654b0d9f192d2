"""The decoder with one result for a row: scores of classes, or the embedding of a text.

Heads belong to the last stage. They pool a row and need all of it, so context parallelism is not for them.

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
    """The backbone with a `ClassificationHead` on its last stage.

    Args:
        params: Sizes of the whole model.
        stage: Which part to build.
        num_classes: Number of classes.
        pooling: How the tokens of a row become one vector.
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
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Tensor,
        *,
        position_ids: Tensor | None = None,
        documents_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L]; see `DecoderModel.forward`. Where padding is
                on the left, give the mask here too.
            mask_BL: Where there is a token [B, L], bool or 0 and 1; None for everywhere.
            labels: The class of each row [B], int64; -100 leaves a row out. Only the last stage looks at them.

        Returns:
            On the last stage the loss of each row [B] in nats (float32, or float64 for a float64 model) if labels are
            given, else its logits [B, C]; hidden states [B, L, D] on every other stage.

        Raises:
            UserError: If the input is not what this stage takes, or something else does not fit it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL)
        return hidden_BLD if self.head is None else classify(self.head, hidden_BLD, mask_BL=mask_BL, labels_B=labels)


@final
class DecoderForEmbedding(nn.Module):
    """The backbone with an `EmbeddingHead` on its last stage; how vectors are compared is for the task to say.

    Args:
        params: Sizes of the whole model.
        stage: Which part to build.
        embedding_size: Size of the vectors; None for the hidden size, without a projection.
        pooling: How the tokens of a row become one vector.
        normalize: Whether vectors are scaled to length 1.
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
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Tensor,
        *,
        position_ids: Tensor | None = None,
        documents_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
    ) -> Tensor:
        """Run this stage; arguments are those of `DecoderForClassification.forward`.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L].
            mask_BL: Where there is a token [B, L], bool or 0 and 1; None for everywhere.

        Returns:
            On the last stage a vector for each row [B, E], in at least float32 if normalised; hidden states [B, L, D]
            on every other stage.

        Raises:
            UserError: If the input is not what this stage takes, or something else does not fit it.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL)
        return hidden_BLD if self.head is None else self.head(hidden_BLD, mask_BL=mask_BL)


def classify(
    head: ClassificationHead, hidden_BLD: Tensor, *, mask_BL: Tensor | None, labels_B: Tensor | None
) -> Tensor:
    """Logits of a classification head [B, C], or its losses [B] where labels [B] are given.

    Raises:
        UserError: If mask or labels do not fit, or a label is none of the classes.
    """
    logits_BC = head(hidden_BLD, mask_BL=mask_BL)
    if labels_B is None:
        return logits_BC
    if labels_B.shape != logits_BC.shape[:1]:
        raise UserError(
            f"labels of classes have shape {tuple(labels_B.shape)}; expected {tuple(logits_BC.shape[:1])}, one class "
            "for each row."
        )
    check_token_ids(labels_B, logits_BC.shape[1], what="labels of classes", ignored=IGNORED_LABEL)
    wide_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    return F.cross_entropy(wide_BC, labels_B, reduction="none", ignore_index=IGNORED_LABEL)


def drop_tied_embedding(backbone: DecoderModel) -> None:
    """Without a language-model head nothing is tied: the embedding is on the first stage alone."""
    if not backbone.stage.is_first:
        backbone.embedding = None


def _pooled_backbone(params: DecoderParams, stage: StageInfo) -> DecoderModel:
    backbone = DecoderModel(params, stage)
    drop_tied_embedding(backbone)
    return backbone
