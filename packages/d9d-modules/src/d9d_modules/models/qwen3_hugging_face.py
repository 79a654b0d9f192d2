"""Qwen3 in the Hugging Face layout: names of tensors and `config.json`, both ways."""

from collections.abc import Callable
from typing import TypeAlias

from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_value, rope_theta
from d9d_modules.models.qwen3 import Qwen3Params
from d9d_state import JsonValue, StateMapper, parallel, rename, repeat, scope

FeedForwardMapper: TypeAlias = Callable[[int], StateMapper]
"""Maps the feed-forward block of the layer with the given index; names start below `mlp.` and `feed_forward.`."""


def qwen3_from_hugging_face(params: Qwen3Params, *, feed_forward: FeedForwardMapper | None = None) -> StateMapper:
    """Mapper from a Hugging Face checkpoint on disk to `Qwen3ForCausalLM`; its `inverse()` exports.

    Args:
        params: Sizes of the model.
        feed_forward: Maps the blocks that the model's `feed_forward` builds; None for the family's SwiGLU.
    """
    layer = scope("model.layers.{i}.", "backbone.layers.{i}.", _attention_and_norms())
    feed_forward = feed_forward or (lambda _: swiglu_from_hugging_face())
    return parallel(
        rename("model.embed_tokens.weight", "backbone.embedding.weight"),
        repeat(layer, i=range(params.num_layers)),
        *(
            scope(f"model.layers.{index}.mlp.", f"backbone.layers.{index}.feed_forward.", feed_forward(index))
            for index in range(params.num_layers)
        ),
        rename("model.norm.weight", "backbone.norm.weight"),
        *([] if params.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
    )


def swiglu_from_hugging_face() -> StateMapper:
    """Mapper of one dense feed-forward block, names starting at its projections."""
    names = [f"{projection}_proj.weight" for projection in ("gate", "up", "down")]
    return parallel(*(rename(name, name) for name in names))


def qwen3_hugging_face_config(params: Qwen3Params) -> dict[str, JsonValue]:
    """The `config.json` with which `transformers` and inference engines load an exported `Qwen3ForCausalLM`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
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
        "use_sliding_window": False,
        "rope_theta": params.rope_theta,
        "rms_norm_eps": params.rms_norm_eps,
        "tie_word_embeddings": params.tie_word_embeddings,
        "initializer_range": params.initializer_range,
        "max_position_embeddings": params.max_position_embeddings,
    }


def qwen3_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """Sizes from the parsed `config.json` of a Qwen3 checkpoint.

    Raises:
        UserError: If it describes another family, lacks a size, or asks for what is not implemented.
    """
    require_value(config, "model_type", "qwen3", required=True)
    return decoder_params_from_hugging_face(config)


def decoder_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """The part of the configuration that the dense and the sparse family share.

    Raises:
        UserError: If it lacks a size, or asks for what is not implemented.
    """
    require_value(config, "hidden_act", "silu")
    require_value(config, "attention_bias", supported=False)
    require_value(config, "use_sliding_window", supported=False)
    return Qwen3Params(
        vocab_size=config_value(config, "vocab_size", int),
        hidden_size=config_value(config, "hidden_size", int),
        num_layers=config_value(config, "num_hidden_layers", int),
        num_heads=config_value(config, "num_attention_heads", int),
        num_kv_heads=config_value(config, "num_key_value_heads", int),
        head_dim=config_value(config, "head_dim", int),
        intermediate_size=config_value(config, "intermediate_size", int),
        tie_word_embeddings=config_value(config, "tie_word_embeddings", bool, default=False),
        rope_theta=rope_theta(config),
        rms_norm_eps=config_value(config, "rms_norm_eps", float, default=1e-6),
        initializer_range=config_value(config, "initializer_range", float, default=0.02),
        max_position_embeddings=config_value(config, "max_position_embeddings", int, default=32768),
    )


def _attention_and_norms() -> StateMapper:
    projections = [f"{projection}_proj.weight" for projection in ("q", "k", "v", "o")]
    return parallel(
        rename("input_layernorm.weight", "attention_norm.weight"),
        rename("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        scope(
            "self_attn.",
            "attention.",
            parallel(*(rename(name, name) for name in [*projections, "q_norm.weight", "k_norm.weight"])),
        ),
    )
