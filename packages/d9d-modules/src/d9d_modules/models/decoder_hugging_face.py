"""Weights of decoders in a Hugging Face checkpoint: state mappers, for all families."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from d9d_modules.models.decoder_params import DecoderParams
from d9d_state import StateMapper, parallel, rename, rename_all, scope

FeedForwardMapper: TypeAlias = Callable[[int], StateMapper]
"""Function that maps a layer index to the mapper of its feed-forward block; names are relative to the block."""


def decoder_from_hugging_face(
    params: DecoderParams, *, prefix: str = "model.", feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`; its `inverse()` exports.

    `prefix` is the prefix of the backbone's tensor names. `feed_forward` returns the mapper of each feed-forward block;
    None for `params.feed_forward_from_hugging_face`.
    """
    return parallel(
        decoder_backbone_from_hugging_face(params, prefix=prefix, feed_forward=feed_forward),
        *([] if params.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
    )


def decoder_backbone_from_hugging_face(
    params: DecoderParams, *, prefix: str = "model.", feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper of the backbone only, for models whose heads are not in the checkpoint.

    The `prefix` of tensor names is empty in text-embedding checkpoints, which have no head. `feed_forward` has the same
    meaning as in `decoder_from_hugging_face`.
    """
    return parallel(
        rename(f"{prefix}embed_tokens.weight", "backbone.embedding.weight"),
        *(
            scope(
                f"{prefix}layers.{index}.",
                f"backbone.layers.{index}.",
                decoder_layer_from_hugging_face(params, index, feed_forward=feed_forward),
            )
            for index in range(params.num_layers)
        ),
        rename(f"{prefix}norm.weight", "backbone.norm.weight"),
    )


def norm_names(params: DecoderParams, theirs: str, ours: str) -> dict[str, str]:
    """Map a norm's parameter names in the checkpoint to its names in the model; only some families have a bias."""
    with torch.device("meta"):
        names = [name for name, _ in params.norm().named_parameters()]
    return {f"{theirs}.{name}": f"{ours}.{name}" for name in names}


def decoder_layer_from_hugging_face(
    params: DecoderParams, index: int, *, feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper of the layer with this global index, with names relative to the layer."""
    feed_forward = feed_forward or params.feed_forward_from_hugging_face
    norms = [
        rename_all(norm_names(params, theirs, ours))
        for theirs, ours in params.hugging_face_norms.items()
        if ours != "attention_norm" or params.has_attention_norm(index)
    ]
    return parallel(
        *norms,
        params.mixer_from_hugging_face(index),
        scope("mlp.", "feed_forward.", feed_forward(index)),
    )
