"""Decoders with heads on the last stage: language model, sequence classification, text embedding, or several heads.

Heads that pool need whole rows, so they do not support context parallelism.

Shape legend: B batch, L length, D hidden size, V vocabulary, C classes, E embedding size.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias, final

from torch import Tensor, nn

from d9d_dist.errors import UserError
from d9d_dist.stage import StageInfo
from d9d_modules.cross_entropy import IGNORED_LABEL
from d9d_modules.lm_head import LanguageModelHead, Scores
from d9d_modules.models.decoder_model import WHOLE_MODEL, DecoderModel, Received
from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.pooling import Pooling
from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead

Head: TypeAlias = LanguageModelHead | ClassificationHead | EmbeddingHead
"""Head types that decoders support."""

HeadFactory: TypeAlias = Callable[[DecoderModel], Head]
"""Function that builds a head for the last stage of a backbone, such as `decoder_lm_head`."""


class HeadedDecoder(nn.Module):
    """Backbone with heads on its last stage. Base class of the decoders below.

    Args:
        heads: Head factories by head name.
        in_dict: If True, the heads are in the `ModuleDict` `heads`, and labels and outputs are mappings by head name;
            else the one head is a direct submodule.

    Attributes:
        transform: `DecoderParams.head_transform` on the stage of a language-model head, else None.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo, heads: Mapping[str, HeadFactory], *, in_dict: bool = False
    ) -> None:
        super().__init__()
        self.backbone = DecoderModel(params, stage)
        owner = nn.ModuleDict() if in_dict else self
        if in_dict:
            self.heads = owner
        for name, build in heads.items():
            # Register None on the other stages, so that the names of a tensor-parallel plan exist on each stage.
            owner.register_module(name, build(self.backbone) if stage.is_last else None)
        is_lm = any(isinstance(head, LanguageModelHead) for head in owner.children())
        self.transform = params.head_transform() if is_lm else None
        self._head_names, self._in_dict = tuple(heads), in_dict
        if not stage.is_first and not is_lm:  # only a language-model head is tied to the embedding
            self.backbone.embedding = None

    @property
    def layers(self) -> nn.ModuleDict:
        """Decoder layers of this stage, keyed by their global index."""
        return self.backbone.layers

    def ends(self) -> list[nn.Module]:
        """Return this stage's embedding and heads, except modules without parameters or with a shared parameter."""
        owner = self.heads if self._in_dict else self
        heads = [owner.get_submodule(name) for name in self._head_names if self.backbone.stage.is_last]
        ends = [end for end in (self.backbone.embedding, *heads) if end is not None]
        owners = Counter(parameter for end in ends for parameter in set(end.parameters()))
        return [end for end in ends if {owners[parameter] for parameter in end.parameters()} == {1}]

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
    ) -> Received | dict[str, Tensor]:
        """Run this stage.

        Args:
            hidden: See `DecoderModel.forward`.
            position_ids: See `DecoderModel.forward`.
            document_ids_BL: Document id of each position [B, L], integer; see `DecoderModel.forward`. With left
                padding, pass the token mask here as well, so that tokens do not attend to padding.
            mask_BL: Token mask [B, L] for heads that pool and for experts, bool or 0 and 1; None if there is no
                padding.
            expert_indices: See `DecoderModel.forward`.
            attention_mask: Boolean mask [B, L, L] or [1, L, L]; see `DecoderModel.forward`.
            labels: Used only on the last stage, int64; by head name for a `DecoderWithHeads`. Language model: token to
                predict at each position [B, L], already shifted, or K candidates [B, L, K]. Classification: class of
                each row [B]. -100 for positions and rows without a loss. Embedding: None; the task computes the loss.
            scores: True for log-probabilities and entropies instead of losses; `"log_probs"` without the entropies.
                Requires a single language-model head.

        Returns:
            On the last stage, by head name for a `DecoderWithHeads`. With labels, the loss of each token [B, L] or row
            [B] in nats (float32, or float64 for a float64 model). Auxiliary losses are included: those of the token, or
            their mean over the tokens of the row. Without labels, the logits [B, L, V] or [B, C], or the embeddings
            [B, E], in at least float32 if normalized. With `scores`, see `LanguageModelHead.forward`; auxiliary losses
            [B, L], 0 where all labels are ignored, are then under `auxiliary_losses`. On other stages, the output of
            `DecoderModel.forward`.

        Raises:
            UserError: If `hidden` is not a valid input of this stage, another argument does not match it, or labels
                name an unknown head or one without a loss.
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
        return self.apply_heads(x, mask_BL=mask_BL, labels=labels, scores=scores)

    def apply_heads(
        self, x: Received, *, mask_BL: Tensor | None, labels: Tensor | Mapping[str, Tensor] | None, scores: Scores
    ) -> Tensor | dict[str, Tensor]:
        """Compute the outputs of the last stage from the output of its backbone; other arguments as in `forward`."""
        names, owner = self._head_names, self.heads if self._in_dict else self
        if scores:
            return self._scores(owner.get_submodule(names[0]), x, labels, scores)
        by_name = labels or {} if self._in_dict else {names[0]: labels}
        assert isinstance(by_name, Mapping), "several heads take labels by name"
        unknown = [name for name in by_name if name not in names]
        if unknown:
            raise UserError(f"got labels for unknown head {unknown[0]!r}; expected one of {', '.join(names)}.")
        outputs = {
            name: self._output(name, owner.get_submodule(name), x, mask_BL=mask_BL, labels=by_name.get(name))
            for name in names
        }
        return outputs if self._in_dict else outputs[names[0]]

    def _transformed(self, hidden_BLD: Tensor) -> Tensor:
        return hidden_BLD if self.transform is None else self.transform(hidden_BLD)

    def _output(
        self, name: str, head: nn.Module, x: Received, *, mask_BL: Tensor | None, labels: Tensor | None
    ) -> Tensor:
        hidden_BLD, auxiliary_BL = x if isinstance(x, tuple) else (x, None)
        match head:
            case LanguageModelHead():
                output = head(self._transformed(hidden_BLD), labels=labels)
            case ClassificationHead():
                output = head(hidden_BLD, mask_BL=mask_BL, labels=labels)
            case EmbeddingHead():
                if labels is not None:
                    raise UserError(
                        f"got labels for {name!r}, an EmbeddingHead, which has no loss; expected none. Compute the "
                        "loss of its embeddings in the task."
                    )
                output = head(hidden_BLD, mask_BL=mask_BL)
            case _:
                raise UserError(
                    f"the head {name!r} is a {type(head).__name__}; expected a LanguageModelHead, a "
                    "ClassificationHead or an EmbeddingHead. For other heads, write your own module around the "
                    "backbone."
                )
        if auxiliary_BL is None or labels is None:
            return output
        if labels.dim() > auxiliary_BL.dim():
            raise UserError(
                "got several labels for each position of a model with router losses; expected one label for each "
                'position. Pass scores="log_probs", which returns router losses separately, or balance experts by a '
                "bias."
            )
        if labels.dim() == 1:
            num_tokens_B = auxiliary_BL.shape[1] if mask_BL is None else mask_BL.sum(dim=1).clamp(min=1)
            auxiliary_BL = auxiliary_BL.sum(dim=1) / num_tokens_B
        return output + auxiliary_BL.masked_fill(labels == IGNORED_LABEL, 0.0)

    def _scores(
        self, head: nn.Module, x: Received, labels: Tensor | Mapping[str, Tensor] | None, scores: Scores
    ) -> dict[str, Tensor]:
        if self._in_dict or not isinstance(head, LanguageModelHead):
            raise UserError(
                f"got scores for a model with the heads {', '.join(self._head_names)}; expected one "
                "LanguageModelHead. Compute the scores from the logits."
            )
        hidden_BLD, auxiliary_BL = x if isinstance(x, tuple) else (x, None)
        outputs: dict[str, Tensor] = head(self._transformed(hidden_BLD), labels=labels, scores=scores)
        if auxiliary_BL is not None:
            assert isinstance(labels, Tensor), "the head has checked its labels"
            is_ignored = labels == IGNORED_LABEL
            is_ignored_BL = is_ignored if labels.dim() == auxiliary_BL.dim() else is_ignored.all(dim=-1)
            outputs["auxiliary_losses"] = auxiliary_BL.masked_fill(is_ignored_BL, 0.0)
        return outputs


@final
class DecoderForCausalLM(HeadedDecoder):
    """Backbone with a language-model head on its last stage.

    With weight tying, the head and the embedding share one parameter.
    """

    lm_head: LanguageModelHead | None

    def __init__(self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL) -> None:
        super().__init__(params, stage, {"lm_head": decoder_lm_head})


@final
class DecoderForClassification(HeadedDecoder):
    """Backbone with a `ClassificationHead` on its last stage; `pooling=None` selects the family's pooling."""

    def __init__(
        self,
        params: DecoderParams,
        stage: StageInfo = WHOLE_MODEL,
        *,
        num_classes: int,
        pooling: Pooling | None = None,
    ) -> None:

        def head(_: DecoderModel) -> ClassificationHead:
            return ClassificationHead(
                params.hidden_size,
                num_classes,
                pooling=pooling or params.pooling,
                transform=params.head_transform(),
                bias=params.score_bias,
                init_std=params.initializer_range,
            )

        super().__init__(params, stage, {"head": head})


@final
class DecoderForEmbedding(HeadedDecoder):
    """Backbone with an `EmbeddingHead` on its last stage. Takes the arguments of the head; the task computes the loss.

    `pooling=None` selects the family's pooling.

    Raises:
        UserError: If `params` has auxiliary losses.
    """

    def __init__(
        self,
        params: DecoderParams,
        stage: StageInfo = WHOLE_MODEL,
        *,
        embedding_size: int | None = None,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> None:
        pooling = pooling or params.pooling
        _require_no_losses(params, "an embedding model computes no loss")
        size, std = params.hidden_size, params.initializer_range
        head = partial(EmbeddingHead, size, embedding_size, pooling=pooling, normalize=normalize, init_std=std)
        super().__init__(params, stage, {"head": lambda _: head()})


@final
class DecoderWithHeads(HeadedDecoder):
    """Backbone with several named heads on its last stage, each with its own loss.

        model = DecoderWithHeads(params, heads={
            "text": decoder_lm_head,
            "topic": lambda backbone: ClassificationHead(backbone.params.hidden_size, 4),
        })
        losses = model(input_ids, labels={"text": next_ids, "topic": topics})    # {"text": [B, L], "topic": [B]}

    Raises:
        UserError: If `heads` is empty, a name is not a valid submodule name, or `params` has auxiliary losses.
    """

    def __init__(
        self, params: DecoderParams, stage: StageInfo = WHOLE_MODEL, *, heads: Mapping[str, HeadFactory]
    ) -> None:
        wrong = [name for name in heads if not name.isidentifier() or name in dir(nn.ModuleDict)]
        if wrong or not heads:
            raise UserError(
                f"got head names {', '.join(map(repr, wrong)) or 'none'}; expected at least one, each a Python "
                "identifier that is not an attribute of nn.ModuleDict."
            )
        _require_no_losses(params, "a model with named heads has several losses")
        super().__init__(params, stage, heads, in_dict=True)


def decoder_lm_head(backbone: DecoderModel) -> LanguageModelHead:
    """Build the language-model head of a last stage; with weight tying it shares the embedding's parameter."""
    params = backbone.params
    head = params.lm_head()
    if params.tie_word_embeddings:
        assert backbone.embedding is not None  # the last stage has it if weights are tied
        head.weight = backbone.embedding.get_parameter("weight")
    return head


def _require_no_losses(params: DecoderParams, reason: str) -> None:
    if params.auxiliary_losses is not None:
        name = params.auxiliary_losses.name
        raise UserError(
            f"the model has {name}, but {reason}; expected no {name}, because they are added to a single loss. Remove "
            f"the {name}, or balance experts without a loss."
        )
