"""Weights of decoders in a Hugging Face checkpoint: state mappers, for all families."""

from collections.abc import Callable
from typing import TypeAlias

from d9d_modules.models.decoder_params import DecoderParams
from d9d_state import StateMapper, parallel, rename, repeat, scope

FeedForwardMapper: TypeAlias = Callable[[int], StateMapper]
"""Function that maps a layer index to the mapper of its feed-forward block; names are relative to the block."""


def decoder_from_hugging_face(params: DecoderParams, *, feed_forward: FeedForwardMapper | None = None) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`; its `inverse()` exports.

    `feed_forward` returns the mapper of each feed-forward block; None for `SwiGLU`.
    """
    return parallel(
        decoder_backbone_from_hugging_face(params, feed_forward=feed_forward),
        *([] if params.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
    )


def decoder_classifier_from_hugging_face(
    params: DecoderParams, *, feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper from a Hugging Face `...ForSequenceClassification` checkpoint to `DecoderForClassification`.

    `feed_forward` has the same meaning as in `decoder_from_hugging_face`.
    """
    backbone = decoder_backbone_from_hugging_face(params, feed_forward=feed_forward)
    return parallel(backbone, rename("score.weight", "head.score.weight"))


def decoder_backbone_from_hugging_face(
    params: DecoderParams, *, prefix: str = "model.", feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper of the backbone only, for models whose heads are not in the checkpoint.

    The `prefix` of tensor names is empty in text-embedding checkpoints, which have no head. `feed_forward` has the same
    meaning as in `decoder_from_hugging_face`.
    """
    mixer = {f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in params.hugging_face_mixer.items()}
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
    layer = parallel(*(rename(f"{theirs}.weight", f"{ours}.weight") for theirs, ours in (norms | mixer).items()))
    feed_forward = feed_forward or (lambda _: swiglu_from_hugging_face())
    return parallel(
        rename(f"{prefix}embed_tokens.weight", "backbone.embedding.weight"),
        repeat(scope(prefix + "layers.{i}.", "backbone.layers.{i}.", layer), i=range(params.num_layers)),
        *(
            scope(f"{prefix}layers.{index}.mlp.", f"backbone.layers.{index}.feed_forward.", feed_forward(index))
            for index in range(params.num_layers)
        ),
        rename(f"{prefix}norm.weight", "backbone.norm.weight"),
    )


def swiglu_from_hugging_face() -> StateMapper:
    """Build the mapper of one `SwiGLU` block, with names relative to the block."""
    names = [f"{projection}_proj.weight" for projection in ("gate", "up", "down")]
    return parallel(*(rename(name, name) for name in names))
