"""Several named heads on one decoder, so that it can learn several things at once.

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
"""A head that `DecoderWithHeads` can have."""

HeadFactory: TypeAlias = Callable[[DecoderModel], Head]
"""Builds a head for the last stage of a backbone; for a language model, `decoder_lm_head`."""


@final
class DecoderWithHeads(nn.Module):
    """One backbone with several named heads on its last stage, each with a loss of its own.

        model = DecoderWithHeads(params, heads={
            "text": decoder_lm_head,
            "topic": lambda backbone: ClassificationHead(backbone.params.hidden_size, 4),
        })
        losses = model(input_ids, labels={"text": next_ids, "topic": topics})    # {"text": [B, L], "topic": [B]}

    Args:
        params: Sizes of the whole model.
        stage: Which part to build.
        heads: Builds each head, by its name.

    Raises:
        UserError: If there is no head, or a name is none that a submodule can have.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, heads: Mapping[str, HeadFactory]
    ) -> None:
        super().__init__()
        _check_names(heads)
        self.backbone = DecoderModel(params, stage)
        self.heads = nn.ModuleDict()
        for name, build in heads.items():
            # Without a head under each name, a tensor-parallel plan would name what the stage does not have.
            self.heads.register_module(name, build(self.backbone) if stage.is_last else None)
        if not any(isinstance(head, LanguageModelHead) for head in self.heads.values()):
            drop_tied_embedding(self.backbone)

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
        labels: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run this stage.

        Args:
            hidden: Token ids [B, L], int64, on the first stage; hidden states [B, L, D] on later ones.
            position_ids: Positions [B, L] or [1, L], integer; None counts from 0 in each row.
            documents_BL: Which document each position belongs to [B, L]; see `DecoderModel.forward`.
            mask_BL: Where there is a token [B, L], for heads that pool; None for everywhere.
            labels: What heads are to predict, by their names: [B, L] of a language model, [B] of a classifier, int64;
                -100 leaves a position or row out. Only the last stage looks at them.

        Returns:
            On the last stage, by name: a head's losses ([B, L] or [B], in nats) if it has labels, else its logits or
            vectors. Hidden states [B, L, D] on every other stage.

        Raises:
            UserError: If the input is not what this stage takes, something else does not fit it, or there are labels
                for a head that is not there or has no loss.
        """
        labels = {} if labels is None else labels
        unknown = [name for name in labels if name not in self.heads]
        if unknown:
            raise UserError(f"labels name the head {unknown[0]!r}; expected some of {', '.join(self.heads)}.")
        hidden_BLD = self.backbone(hidden, position_ids=position_ids, documents_BL=documents_BL)
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
                    f"got labels for {name!r}, an EmbeddingHead, which has no loss of its own; expected none. Compute "
                    "the loss of its vectors in the task."
                )
            return head(hidden_BLD, mask_BL=mask_BL)
        case _:
            raise UserError(
                f"the head {name!r} is a {type(head).__name__}; expected a LanguageModelHead, a ClassificationHead or "
                "an EmbeddingHead. Put another one around the backbone in a module of your own."
            )


def _check_names(heads: Mapping[str, HeadFactory]) -> None:
    wrong = [name for name in heads if not name.isidentifier() or name in dir(nn.ModuleDict)]
    if wrong or not heads:
        raise UserError(
            f"heads are named {', '.join(map(repr, wrong)) or 'nothing'}; expected at least one, and names that "
            "submodules can have."
        )
