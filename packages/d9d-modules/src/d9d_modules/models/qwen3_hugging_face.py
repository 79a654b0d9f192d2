"""Hugging Face layout of Qwen3: state mapper and `config.json`, in both directions."""

from dataclasses import replace

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_hugging_face import (
    DECODER_ENTRIES,
    DECODER_KEYS,
    FeedForwardMapper,
    decoder_from_hugging_face,
    decoder_hugging_face_config,
    require_plain_decoder,
)
from d9d_modules.models.hugging_face_config import (
    HuggingFaceConfig,
    config_keys_in_errors,
    config_value,
    require_known_keys,
    require_value,
)
from d9d_modules.models.hugging_face_irrelevant import QWEN3_IRRELEVANT
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face
from d9d_modules.models.qwen3 import Qwen3Params
from d9d_state import JsonValue, StateMapper

QWEN3_ENTRIES = (*DECODER_ENTRIES, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
"""Entries of `config.json` that `qwen3_params_from_hugging_face` reads."""


def qwen3_from_hugging_face(params: Qwen3Params, *, feed_forward: FeedForwardMapper | None = None) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `Qwen3ForCausalLM`; its `inverse()` exports.

    Args:
        params: Hyperparameters of the model.
        feed_forward: Returns the mapper of each custom feed-forward block; None for `SwiGLU`.
    """
    return decoder_from_hugging_face(params, feed_forward=feed_forward)


def qwen3_hugging_face_config(params: Qwen3Params) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Qwen3ForCausalLM` for `transformers` and inference engines.

    Raises:
        UserError: If `config.json` cannot represent the RoPE scaling.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_hugging_face_config(params),
        **_sliding_entries(params),
    }


def qwen3_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """Read the hyperparameters from the parsed `config.json` of a Qwen3 checkpoint.

    Raises:
        UserError: If it describes another family, lacks an entry, or needs an unsupported feature.
    """
    require_value(config, "model_type", "qwen3", required=True)
    require_known_keys(config, used=QWEN3_ENTRIES, irrelevant=QWEN3_IRRELEVANT)
    params = decoder_params_from_hugging_face(config)
    layers = _sliding_layers(config, params.num_layers)
    if not layers:
        return params
    return replace(params, sliding_window=sliding_window_of(config), sliding_layers=layers)


def decoder_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """Read the hyperparameters that dense and sparse Qwen3 share: all except the sliding windows.

    Raises:
        UserError: If `config.json` lacks an entry or needs an unsupported feature.
    """
    require_plain_decoder(config)
    theta, scaling = rope_from_hugging_face(config)
    with config_keys_in_errors(DECODER_KEYS):
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


def sliding_window_of(config: HuggingFaceConfig) -> int:
    """Read the sliding-window size of a configuration that enables sliding windows.

    Raises:
        UserError: If the entry is missing or not a positive integer.
    """
    if config.get("sliding_window") is None:
        raise UserError(
            "config.json has no 'sliding_window', but use_sliding_window = True; expected the window size in positions."
        )
    return config_value(config, "sliding_window", int)


def _sliding_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a sliding window: by `layer_types`, or else all layers from `max_window_layers` on."""
    is_sliding = config_value(config, "use_sliding_window", bool, default=False)
    types = config.get("layer_types")
    if types is None:
        first = config_value(config, "max_window_layers", int, default=28, minimum=0)
        return tuple(range(first, num_layers)) if is_sliding else ()
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise UserError(
            f"config.json has layer_types = {types!r}; expected a list of num_hidden_layers = {num_layers} items, "
            f"each one of {', '.join(known)}."
        )
    if not is_sliding and known[1] in types:
        raise UserError(
            f"config.json has layer_types = {types!r} and use_sliding_window = False; expected no {known[1]!r}, or "
            "use_sliding_window = True with a sliding_window."
        )
    return tuple(index for index, each in enumerate(types) if each == "sliding_attention")


def _sliding_entries(params: Qwen3Params) -> dict[str, JsonValue]:
    """Return all three entries, also without windows, to override those of the original `config.json`."""
    if params.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    return {
        "use_sliding_window": True,
        "sliding_window": params.sliding_window,
        "layer_types": [
            "sliding_attention" if index in params.sliding_layers else "full_attention"
            for index in range(params.num_layers)
        ],
    }
