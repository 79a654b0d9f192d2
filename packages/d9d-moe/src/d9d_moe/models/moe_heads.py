"""Sparse decoders with a head on the last stage: language model, sequence classification, or embedding.

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
    """Identity at which a tensor-parallel plan gathers the router losses along the sequence."""

    def forward(self, losses_BL: Tensor) -> Tensor:
        """Return the losses [B, L] unchanged."""
        return losses_BL


@final
class MoeForCausalLM(nn.Module):
    """Backbone with a `LanguageModelHead` on the last stage.

    With weight tying the head and the token embedding share one parameter.

    Args:
        params: Parameters of the model.
        stage: Pipeline stage to build.
    """

    def __init__(self, params: MoeDecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__()
        self.backbone = MoeDecoder(params, stage)
        self.lm_head = _lm_head(self.backbone) if stage.is_last else None
        self.router_losses = _router_loss_join(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """Decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Received:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later stages the output of the previous stage.
            position_ids: Positions [B, L] or [1, L], integer; None for 0 to L - 1 in each row.
            document_ids_BL: Document id of each position [B, L], integer; None if each row is one document.
            mask_BL: Token mask [B, L], bool or 0 and 1: true for tokens, false for padding; None if there is no
                padding. Padding is not counted, and its router losses are 0.
            labels: Token to predict at each position [B, L], int64, shifted by the caller; the loss at -100 is 0. Only
                the last stage uses them.

        Returns:
            On the last stage, with labels: the loss of each token [B, L] in nats, router losses included, in float32
            (float64 for a float64 model); without labels: the logits [B, L, V]. On other stages: the hidden states
            [B, L, D], or with router losses a tuple of them and the router losses so far.

        Raises:
            UserError: If the input is invalid for this stage, or positions, documents or labels do not match its shape.
        """
        x = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL, mask_BL=mask_BL)
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
    """Backbone with a `ClassificationHead` on the last stage.

    Args:
        params: Parameters of the model.
        stage: Pipeline stage to build.
        num_classes: Number of classes.
        pooling: Pooling of the tokens of a row to one vector.
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
        self.router_losses = _router_loss_join(self.backbone)

    @property
    def layers(self) -> nn.ModuleDict:
        """Decoder layers of this stage, by their index in the whole model."""
        return self.backbone.layers

    def forward(
        self,
        hidden: Received,
        *,
        position_ids: Tensor | None = None,
        document_ids_BL: Tensor | None = None,
        mask_BL: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Received:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; on later stages the output of the previous stage.
            position_ids: Positions [B, L] or [1, L], integer; None for 0 to L - 1 in each row.
            document_ids_BL: Document id of each position [B, L], integer; None if each row is one document. With
                padding on the left, pass the mask here too.
            mask_BL: Token mask [B, L], bool or 0 and 1: true for tokens, false for padding; None if there is no
                padding.
            labels: Class of each row [B], int64; the loss of a row with -100 is 0. Only the last stage uses them.

        Returns:
            On the last stage, with labels: the loss of each row [B] in nats, plus the mean of the router losses of its
            tokens; without labels: the logits [B, C]. On other stages: as `MoeForCausalLM.forward`.

        Raises:
            UserError: If the input is invalid for this stage, or another argument does not match its shape.
        """
        x = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL, mask_BL=mask_BL)
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
    """Backbone with an `EmbeddingHead` on the last stage. The loss between embeddings is computed by the task.

    Args:
        params: Parameters of the model, without router losses: the model has no loss to which they could be added.
        stage: Pipeline stage to build.
        embedding_size: Size E of the embeddings; None for the hidden size, without a projection.
        pooling: Pooling of the tokens of a row to one vector.
        normalize: Scale embeddings to Euclidean norm 1.

    Raises:
        UserError: If `params` has router losses.
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
                f"router_losses = {params.router_losses} for an embedding model, which has no loss to add them to; "
                "expected none. Remove them, or balance the experts with update_expert_bias."
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
        """Decoder layers of this stage, by their index in the whole model."""
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
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later stages.
            position_ids: Positions [B, L] or [1, L], integer; None for 0 to L - 1 in each row.
            document_ids_BL: Document id of each position [B, L], integer; None if each row is one document. With
                padding on the left, pass the mask here too.
            mask_BL: Token mask [B, L], bool or 0 and 1: true for tokens, false for padding; None if there is no
                padding.

        Returns:
            On the last stage: the embedding of each row [B, E], in at least float32 if normalized. On other stages: the
            hidden states [B, L, D].

        Raises:
            UserError: If the input is invalid for this stage, or another argument does not match its shape.
        """
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL, mask_BL=mask_BL)
        return hidden_BLD if self.head is None else self.head(hidden_BLD, mask_BL=mask_BL)


def _lm_head(backbone: MoeDecoder) -> LanguageModelHead:
    sizes = backbone.sizes
    head = LanguageModelHead(sizes.hidden_size, sizes.vocab_size, init_std=sizes.initializer_range)
    if sizes.tie_word_embeddings:
        assert backbone.embedding is not None  # with weight tying the last stage has the embedding too
        head.weight = backbone.embedding.get_parameter("weight")
    return head


def _router_loss_join(backbone: MoeDecoder) -> RouterLossJoin | None:
    return RouterLossJoin() if backbone.stage.is_last and backbone.has_losses else None


def _pooled_backbone(params: MoeDecoderParams, stage: StageInfo) -> MoeDecoder:
    """Build a backbone whose embedding is on the first stage only: a pooled head is never tied to it."""
    backbone = MoeDecoder(params, stage)
    if not stage.is_first:
        backbone.embedding = None
    return backbone
