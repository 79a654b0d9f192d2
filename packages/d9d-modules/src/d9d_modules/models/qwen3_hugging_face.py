"""Qwen3 in the Hugging Face layout: names of tensors and `config.json`, both ways."""

from dataclasses import replace

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_hugging_face import (
    FeedForwardMapper,
    decoder_from_hugging_face,
    decoder_hugging_face_config,
)
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_value
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face
from d9d_modules.models.qwen3 import Qwen3Params
from d9d_state import JsonValue, StateMapper


def qwen3_from_hugging_face(params: Qwen3Params, *, feed_forward: FeedForwardMapper | None = None) -> StateMapper:
    """Mapper from a Hugging Face checkpoint on disk to `Qwen3ForCausalLM`; its `inverse()` exports.

    Args:
        params: Sizes of the model.
        feed_forward: Maps the blocks that the model's `feed_forward` builds; None for the family's SwiGLU.
    """
    return decoder_from_hugging_face(params, feed_forward=feed_forward)


def qwen3_hugging_face_config(params: Qwen3Params) -> dict[str, JsonValue]:
    """The `config.json` with which `transformers` and inference engines load an exported `Qwen3ForCausalLM`.

    Raises:
        UserError: If the layout has no place for the scaling of the positions.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_hugging_face_config(params),
        **_sliding_entries(params),
    }


def qwen3_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """Sizes from the parsed `config.json` of a Qwen3 checkpoint.

    Raises:
        UserError: If it describes another family, lacks a size, or asks for what is not implemented.
    """
    require_value(config, "model_type", "qwen3", required=True)
    params = decoder_params_from_hugging_face(config)
    layers = _sliding_layers(config, params.num_layers)
    if not layers:
        return params
    return replace(params, sliding_window=config_value(config, "sliding_window", int), sliding_layers=layers)


def decoder_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """The part of the configuration that the dense and the sparse family share: all but sliding windows.

    Raises:
        UserError: If it lacks a size, or asks for what is not implemented.
    """
    require_value(config, "hidden_act", "silu")
    require_value(config, "attention_bias", supported=False)
    require_value(config, "quantization_config", None)
    theta, scaling = rope_from_hugging_face(config)
    return Qwen3Params(
        vocab_size=config_value(config, "vocab_size", int),
        hidden_size=config_value(config, "hidden_size", int),
        num_layers=config_value(config, "num_hidden_layers", int),
        num_heads=config_value(config, "num_attention_heads", int),
        num_kv_heads=config_value(config, "num_key_value_heads", int),
        head_dim=config_value(config, "head_dim", int),
        intermediate_size=config_value(config, "intermediate_size", int),
        tie_word_embeddings=config_value(config, "tie_word_embeddings", bool, default=False),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config_value(config, "rms_norm_eps", float, default=1e-6),
        initializer_range=config_value(config, "initializer_range", float, default=0.02),
        max_position_embeddings=config_value(config, "max_position_embeddings", int, default=32768),
    )


def _sliding_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Layers with a window: those whose type says so, or, without types, those from `max_window_layers` on."""
    if not config_value(config, "use_sliding_window", bool, default=False):
        return ()
    types = config.get("layer_types")
    if types is None:
        return tuple(range(config_value(config, "max_window_layers", int, default=28), num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise UserError(
            f"config.json has layer_types = {types!r}; expected a list of {num_layers}, each one of {', '.join(known)}."
        )
    return tuple(index for index, each in enumerate(types) if each == "sliding_attention")


def _sliding_entries(params: Qwen3Params) -> dict[str, JsonValue]:
    if params.sliding_window is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": params.sliding_window,
        "layer_types": [
            "sliding_attention" if index in params.sliding_layers else "full_attention"
            for index in range(params.num_layers)
        ],
    }
