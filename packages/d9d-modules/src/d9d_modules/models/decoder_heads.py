"""Decoder with several named heads, for multi-task training.

Shape legend: B batch, L length, D hidden size.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias, final

from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models.decoder_model import WHOLE_MODEL, DecoderModel
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.models.decoder_pooled import classify, drop_tied_embedding
from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead

Head: TypeAlias = LanguageModelHead | ClassificationHead | EmbeddingHead
"""Head types that `DecoderWithHeads` supports."""

HeadFactory: TypeAlias = Callable[[DecoderModel], Head]
"""Builds a head for the last stage of a backbone; for a language model, `decoder_lm_head`."""


@final
class DecoderWithHeads(nn.Module):
    """Backbone with several named heads on its last stage, each with its own loss.

        model = DecoderWithHeads(params, heads={
            "text": decoder_lm_head,
            "topic": lambda backbone: ClassificationHead(backbone.params.hidden_size, 4),
        })
        losses = model(input_ids, labels={"text": next_ids, "topic": topics})    # {"text": [B, L], "topic": [B]}

    Args:
        params: Hyperparameters of the whole model.
        stage: Pipeline stage to build.
        heads: Head factories by head name.

    Raises:
        UserError: If `heads` is empty, or a name is not a valid submodule name.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, heads: Mapping[str, HeadFactory]
    ) -> None:
        super().__init__()
        _check_names(heads)
        self.backbone = DecoderModel(params, stage)
        self.heads = nn.ModuleDict()
        for name, build in heads.items():
            # Register None on the other stages, so that the names of a tensor-parallel plan exist on each stage.
            self.heads.register_module(name, build(self.backbone) if stage.is_last else None)
        if not any(isinstance(head, LanguageModelHead) for head in self.heads.values()):
            drop_tied_embedding(self.backbone)

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
        labels: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            document_ids_BL: Document id of each position [B, L]; see `DecoderModel.forward`.
            mask_BL: Token mask [B, L] for heads that pool; None if there is no padding.
            labels: Labels by head name, int64: [B, L] for a language-model head, [B] for a classification head. Label
                -100 ignores a position or row. Used only on the last stage.

        Returns:
            On the last stage, a dict by head name: the losses ([B, L] or [B], in nats) of heads with labels, and the
            logits or embeddings of the others. On other stages, hidden states [B, L, D].

        Raises:
            UserError: If `hidden` is not a valid input of this stage, another argument does not match it, or labels
                name an unknown head or one without a loss.
        """
        labels = {} if labels is None else labels
        unknown = [name for name in labels if name not in self.heads]
        if unknown:
            raise UserError(f"got labels for unknown head {unknown[0]!r}; expected one of {', '.join(self.heads)}.")
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, document_ids_BL=document_ids_BL)
        if not self.backbone.stage.is_last:
            return hidden_BLD
        return {
            name: _output(name, head, hidden_BLD, mask_BL=mask_BL, labels=labels.get(name))
            for name, head in self.heads.items()
        }


def _output(name: str, head: nn.Module, hidden_BLD: Tensor, *, mask_BL: Tensor | None, labels: Tensor | None) -> Tensor:
    match head:
        case LanguageModelHead():
            return head(hidden_BLD, labels=labels)
        case ClassificationHead():
            return classify(head, hidden_BLD, mask_BL=mask_BL, labels_B=labels)
        case EmbeddingHead():
            if labels is not None:
                raise UserError(
                    f"got labels for {name!r}, an EmbeddingHead, which has no loss; expected none. Compute the loss of "
                    "its embeddings in the task."
                )
            return head(hidden_BLD, mask_BL=mask_BL)
        case _:
            raise UserError(
                f"the head {name!r} is a {type(head).__name__}; expected a LanguageModelHead, a ClassificationHead or "
                "an EmbeddingHead. For other heads, write your own module around the backbone."
            )


def _check_names(heads: Mapping[str, HeadFactory]) -> None:
    wrong = [name for name in heads if not name.isidentifier() or name in dir(nn.ModuleDict)]
    if wrong or not heads:
        raise UserError(
            f"got head names {', '.join(map(repr, wrong)) or 'none'}; expected at least one, each a Python identifier "
            "that is not an attribute of nn.ModuleDict."
        )
