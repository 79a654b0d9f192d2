"""Kinds of token mixers in a Hugging Face `config.json`: the entry `layer_types`, and sliding windows."""

from collections.abc import Mapping
from typing import Any

from d9d_dist.errors import UserError
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layers_of_kind
from d9d_state import JsonValue

WINDOW_ENTRIES = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
"""Entries that `read_windows` reads."""


def text_entries(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the entries of the language model, which multimodal configurations contain as `text_config`."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UserError(f"config.json has text_config = {text!r}; expected an object.")
    if text is not config:
        text = {**text, "quantization_config": config.get("quantization_config")}
    return {str(key): value for key, value in text.items()}


def sliding_window_of(config: HuggingFaceConfig) -> int:
    """Read the window size of a configuration with sliding windows; raise a `UserError` if it is missing or invalid."""
    if config.get("sliding_window") is None:
        raise UserError(
            "config.json has no 'sliding_window', but use_sliding_window or layer_types give layers a window; expected "
            "the window size in positions."
        )
    return config_value(config, "sliding_window", int)


def read_windows(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the windows of Qwen2 and Qwen3: by `layer_types`, or else all layers from `max_window_layers` on.

    Without causality, `transformers` excludes the current position from the window size.
    """
    is_sliding = config_value(config, "use_sliding_window", bool, default=False)
    first = config_value(config, "max_window_layers", int, default=28, minimum=0)
    layers = layers_of_kind(
        config, values["num_layers"], "sliding_attention", default=lambda index: is_sliding and index >= first
    )
    if not layers:
        return {}
    if not is_sliding:
        raise UserError(
            f"config.json has layer_types = {config['layer_types']!r} and use_sliding_window = False; expected no "
            "'sliding_attention', or use_sliding_window = True with a sliding_window."
        )
    window = sliding_window_of(config) + (not values.get("is_causal", True))
    return {"sliding_window": window, "sliding_layers": layers}


def written_windows(params: GroupedQueryParams) -> Mapping[str, JsonValue]:
    """Return the window entries of a Qwen2 or Qwen3 model: False or null if no layer has a window."""
    if params.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    return {
        "use_sliding_window": True,
        "sliding_window": params.sliding_window - (not params.attention_form.is_causal),
        "layer_types": written_layer_types(params),
    }


def written_without_windows(params: GroupedQueryParams) -> Mapping[str, JsonValue]:
    """Return no entries; raise a `UserError` if a layer has a sliding window, which the family cannot express."""
    if params.sliding_window is not None:
        raise UserError(
            f"sliding_window = {params.sliding_window}; a config.json of this family has no sliding windows: "
            "expected None."
        )
    return {}


def read_one_window(window: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hyperparameters of a model whose layers all have a sliding window of this size."""
    return {"sliding_window": window, "sliding_layers": tuple(range(values["num_layers"]))}


def require_one_window(params: GroupedQueryParams) -> None:
    """Raise a `UserError` if only some layers have a sliding window; for families with one window for all layers."""
    if params.sliding_window is not None and len(set(params.sliding_layers)) < params.num_layers:
        raise UserError(
            f"sliding_layers = {params.sliding_layers} of {params.num_layers} layers; a config.json of this family has "
            "one window for all layers: expected all layers, or none."
        )


def written_layer_types(params: GroupedQueryParams) -> list[JsonValue]:
    """Return the entry `layer_types`."""
    return [params.mixer_kind(index) for index in range(params.num_layers)]
