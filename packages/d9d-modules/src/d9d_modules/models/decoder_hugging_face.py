"""Hugging Face layout of decoders: state mappers, and the `config.json` entries that all families share."""

from collections.abc import Callable
from typing import TypeAlias

from d9d_modules.models.decoder_params import DecoderParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, require_value
from d9d_modules.models.hugging_face_rope import ROPE_ENTRIES, rope_to_hugging_face
from d9d_state import JsonValue, StateMapper, parallel, rename, repeat, scope

FeedForwardMapper: TypeAlias = Callable[[int], StateMapper]
"""Returns the mapper of the feed-forward block at a global layer index; names are relative to `mlp.`/`feed_forward.`"""

DECODER_ENTRIES = (
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "is_encoder_decoder",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
    *ROPE_ENTRIES,
)
"""Entries of `config.json` that all families read."""

DECODER_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""Names of `config.json` entries by decoder field, where the names differ."""


def decoder_from_hugging_face(params: DecoderParams, *, feed_forward: FeedForwardMapper | None = None) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`; its `inverse()` exports.

    Args:
        params: Hyperparameters of the model.
        feed_forward: Returns the mapper of each custom feed-forward block; None for `SwiGLU`.
    """
    return parallel(
        decoder_backbone_from_hugging_face(params, feed_forward=feed_forward),
        *([] if params.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
    )


def decoder_classifier_from_hugging_face(params: DecoderParams) -> StateMapper:
    """Build the mapper from a Hugging Face `...ForSequenceClassification` checkpoint to `DecoderForClassification`."""
    return parallel(decoder_backbone_from_hugging_face(params), rename("score.weight", "head.score.weight"))


def decoder_backbone_from_hugging_face(
    params: DecoderParams, *, prefix: str = "model.", feed_forward: FeedForwardMapper | None = None
) -> StateMapper:
    """Build the mapper of the backbone only, for models whose heads are not in the checkpoint.

    Args:
        params: Hyperparameters of the model.
        prefix: Prefix of the tensor names in the checkpoint; empty for text-embedding checkpoints, which have no head.
        feed_forward: Returns the mapper of each custom feed-forward block; None for `SwiGLU`.
    """
    layer = scope(prefix + "layers.{i}.", "backbone.layers.{i}.", _attention_and_norms(has_qk_norm=params.has_qk_norm))
    feed_forward = feed_forward or (lambda _: swiglu_from_hugging_face())
    return parallel(
        rename(f"{prefix}embed_tokens.weight", "backbone.embedding.weight"),
        repeat(layer, i=range(params.num_layers)),
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


def decoder_hugging_face_config(params: DecoderParams) -> dict[str, JsonValue]:
    """Return the entries of `config.json` that all families share.

    Raises:
        UserError: If `config.json` cannot represent the RoPE scaling.
    """
    return {
        "vocab_size": params.vocab_size,
        "hidden_size": params.hidden_size,
        "intermediate_size": params.intermediate_size,
        "num_hidden_layers": params.num_layers,
        "num_attention_heads": params.num_heads,
        "num_key_value_heads": params.num_kv_heads,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **rope_to_hugging_face(params),
        "rms_norm_eps": params.rms_norm_eps,
        "tie_word_embeddings": params.tie_word_embeddings,
        "initializer_range": params.initializer_range,
        "max_position_embeddings": params.max_position_embeddings,
    }


def require_plain_decoder(config: HuggingFaceConfig) -> None:
    """Reject features that no decoder family implements, such as attention biases and dropout.

    Raises:
        UserError: If an entry enables such a feature; the message names the entry.
    """
    require_value(config, "hidden_act", "silu")
    require_value(config, "attention_bias", supported=False)
    require_value(config, "attention_dropout", 0.0)
    require_value(config, "quantization_config", None)
    require_value(config, "is_encoder_decoder", supported=False)


def _attention_and_norms(*, has_qk_norm: bool) -> StateMapper:
    projections = [f"{projection}_proj.weight" for projection in ("q", "k", "v", "o")]
    norms = ["q_norm.weight", "k_norm.weight"] if has_qk_norm else []
    return parallel(
        rename("input_layernorm.weight", "attention_norm.weight"),
        rename("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        scope("self_attn.", "attention.", parallel(*(rename(name, name) for name in [*projections, *norms]))),
    )
