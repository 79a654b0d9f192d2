"""Sparse decoders with a head on their last stage: a language model, scores of classes, or a vector for each row.

Shape legend: B batch, L length, D hidden size, V vocabulary, C classes, E embedding size.
"""

from typing import final

from torch import Tensor, nn

from d9d_dist import StageInfo, UserError
from d9d_modules import (
    IGNORED_LABEL,
    WHOLE_MODEL,
    ClassificationHead,
    EmbeddingHead,
    LanguageModelHead,
    Pooling,
)
from d9d_modules.models.decoder_pooled import classify
from d9d_moe.models.moe_decoder import MoeDecoder, MoeDecoderParams, Received


@final
class RouterLossJoin(nn.Module):
    """Where the routers' losses of a rank's tokens become those of whole rows: tensor-parallel plans name it."""

    def forward(self, losses_BL: Tensor) -> Tensor:
        """The losses [B, L] as they are."""
        return losses_BL


@final
class MoeForCausalLM(nn.Module):
    """The backbone with a language-model head on its last stage.

    The weight of a tied head is the embedding's, one parameter in two places.

    Args:
        params: What the family says.
        stage: Which part to build.
    """

    def __init__(self, params: MoeDecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__()
        self.backbone = MoeDecoder(params, stage)
        self.lm_head = _lm_head(self.backbone) if stage.is_last else None
        self.router_losses = _join(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        documents_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Received:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later ones what the stage before returned.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L], integers; None: each row is one.
            mask_BL: Where there is a token [B, L], bool or 0 and 1, None for everywhere: routing of padding costs
                nothing, and is not counted.
            labels: The token to predict at each position [B, L], int64, shifted by the caller; -100 leaves a position
                out. Only the last stage looks at them.

        Returns:
            On the last stage the loss of each token [B, L] in nats (float32, or float64 for a float64 model) if labels
            are given, what its routing costs included, else the logits [B, L, V]. On every other stage hidden states
            [B, L, D], with the routers' losses so far where there are any.

        Raises:
            UserError: If the input is not what this stage takes, or positions, documents or labels do not fit it.
        """
        x = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL, mask_BL=mask_BL)
        if self.lm_head is None:
            return x
        if not isinstance(x, tuple):
            return self.lm_head(x, labels=labels)
        hidden_BLD, router_losses_BL = x
        outputs = self.lm_head(hidden_BLD, labels=labels)
        if labels is None:
            return outputs
        assert self.router_losses is not None
        return outputs + self.router_losses(router_losses_BL).masked_fill(labels == IGNORED_LABEL, 0.0)


@final
class MoeForClassification(nn.Module):
    """The backbone with a `ClassificationHead` on its last stage.

    Args:
        params: What the family says.
        stage: Which part to build.
        num_classes: Number of classes.
        pooling: How the tokens of a row become one vector.
    """

    def __init__(
        self, params: MoeDecoderParams, stage: StageInfo = WHOLE_MODEL, *, num_classes: int, pooling: Pooling = "last"
    ) -> None:
        super().__init__()
        self.backbone = _pooled_backbone(params, stage)
        sizes = self.backbone.sizes
        self.head = (
            ClassificationHead(sizes.hidden_size, num_classes, pooling=pooling, init_std=sizes.initializer_range)
            if stage.is_last
            else None
        )
        self.router_losses = _join(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """The decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        documents_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Received:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later ones what the stage before returned.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L]. Where padding is on the left, give the mask
                here too.
            mask_BL: Where there is a token [B, L], bool or 0 and 1; None for everywhere.
            labels: The class of each row [B], int64; -100 leaves a row out. Only the last stage looks at them.

        Returns:
            On the last stage the loss of each row [B] in nats if labels are given, with the mean over its tokens of
            what routing costs, else its logits [B, C]. On every other stage as `MoeForCausalLM.forward`.

        Raises:
            UserError: If the input is not what this stage takes, or something else does not fit it.
        """
        x = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL, mask_BL=mask_BL)
        if self.head is None:
            return x
        x_BLD, router_losses_BL = x if isinstance(x, tuple) else (x, None)
        outputs = classify(self.head, x_BLD, mask_BL=mask_BL, labels_B=labels)
        if labels is None or router_losses_BL is None:
            return outputs
        assert self.router_losses is not None
        router_losses_BL = self.router_losses(router_losses_BL)
        num_tokens_B = router_losses_BL.shape[1] if mask_BL is None else mask_BL.sum(dim=1).clamp(min=1)
        return outputs + (router_losses_BL.sum(dim=1) / num_tokens_B).masked_fill(labels == IGNORED_LABEL, 0.0)


@final
class MoeForEmbedding(nn.Module):
    """The backbone with an `EmbeddingHead` on its last stage; how vectors are compared is for the task to say.

    Args:
        params: What the family says; its routers have no losses, for which vectors have no place.
        stage: Which part to build.
        embedding_size: Size of the vectors; None for the hidden size, without a projection.
        pooling: How the tokens of a row become one vector.
        normalize: Whether vectors are scaled to length 1.

    Raises:
        UserError: If routers have losses.
    """

    def __init__(
        self,
        params: MoeDecoderParams,
        stage: StageInfo = WHOLE_MODEL,
        *,
        embedding_size: int | None = None,
        pooling: Pooling = "last",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if params.router_losses.any:
            raise UserError(
                f"router_losses = {params.router_losses} for an embedding, which has no losses of its own to add them "
                "to; expected none. Leave them out, or balance experts with update_selection_bias."
            )
        self.backbone = _pooled_backbone(params, stage)
        sizes = self.backbone.sizes
        self.head = (
            EmbeddingHead(
                sizes.hidden_size,
                embedding_size,
                pooling=pooling,
                normalize=normalize,
                init_std=sizes.initializer_range,
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
        """Run this stage; arguments are those of `MoeForClassification.forward`.

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
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL, mask_BL=mask_BL)
        return hidden_BLD if self.head is None else self.head(hidden_BLD, mask_BL=mask_BL)


def _lm_head(backbone: MoeDecoder) -> LanguageModelHead:
    sizes = backbone.sizes
    head = LanguageModelHead(sizes.hidden_size, sizes.vocab_size, init_std=sizes.initializer_range)
    if sizes.tie_word_embeddings:
        assert backbone.embedding is not None  # the last stage of a tied model has it
        head.weight = backbone.embedding.get_parameter("weight")
    return head


def _join(backbone: MoeDecoder) -> RouterLossJoin | None:
    return RouterLossJoin() if backbone.stage.is_last and backbone.has_losses else None


def _pooled_backbone(params: MoeDecoderParams, stage: StageInfo) -> MoeDecoder:
    """Without a language-model head nothing is tied: the embedding is on the first stage alone."""
    backbone = MoeDecoder(params, stage)
    if not stage.is_first:
        backbone.embedding = None
    return backbone
