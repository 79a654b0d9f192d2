"""Strict reading of a Hugging Face `config.json`: missing, mistyped or unsupported entries raise an error.

Also the entries about kinds of token mixers, which several families share: `layer_types` and sliding windows.
"""

import math
import re
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from d9d_dist.errors import UserError
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_state import JsonValue

HuggingFaceConfig: TypeAlias = Mapping[str, object]
"""Parsed `config.json` of a checkpoint."""

T = TypeVar("T", int, float, bool)

DEFAULT_WINDOW = 4096
"""Window of Qwen2 and Qwen3 models that have windows, but no entry `sliding_window`."""

WINDOW_ENTRIES = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
"""Entries that `read_windows` reads."""


def config_value(
    config: HuggingFaceConfig, key: str, kind: type[T], *, default: T | None = None, minimum: float | None = None
) -> T:
    """Read one number or flag of a configuration. An int is accepted as a float; numbers must be finite.

    `default` is the value of a missing entry; None if the entry is required. `minimum` is the smallest valid number;
    None requires a number above 0.

    Raises:
        UserError: If the entry is missing without a default, of another type, or out of range.
    """
    value = config.get(key, default)
    if value is None:
        raise UserError(
            f"config.json has no {key!r}; expected a value of type {kind.__name__}: is this the right checkpoint?"
        )
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise UserError(f"config.json has {key} = {value!r}; expected a value of type {kind.__name__}.")
    if kind is not bool:
        is_in_range = value > 0 if minimum is None else value >= minimum
        if not (is_in_range and math.isfinite(value)):
            bound = "above 0" if minimum is None else f"of at least {minimum}"
            raise UserError(f"config.json has {key} = {value!r}; expected a value of type {kind.__name__} {bound}.")
    return value


def require_value(
    config: HuggingFaceConfig, key: str, supported: object, *, required: bool = False, where: str = "config.json"
) -> None:
    """Check that an entry has the only supported value.

    A missing entry is valid unless it is `required`. Error messages call the configuration `where`.

    Raises:
        UserError: If the entry has another value, or is a number instead of a bool or vice versa.
    """
    if key not in config and not required:
        return
    value = config.get(key)
    if value != supported or isinstance(value, bool) is not isinstance(supported, bool):
        raise UserError(f"{where} has {key} = {value!r}; only {supported!r} is supported.")


def layers_of_kind(
    config: HuggingFaceConfig,
    num_layers: int,
    kind: str,
    *,
    default: Callable[[int], bool],
    known: Collection[str] = ("full_attention", "sliding_attention"),
) -> tuple[int, ...]:
    """Read the indices of the layers with a kind of token mixer from `layer_types`.

    Without this entry, return the indices for which `default` is true.

    Raises:
        UserError: If the entry is not a list of `num_layers` known kinds.
    """
    types = config.get("layer_types")
    if types is None:
        return tuple(filter(default, range(num_layers)))
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise UserError(
            f"config.json has layer_types = {types!r}; expected a list of num_hidden_layers = {num_layers} items, "
            f"each one of {', '.join(known)}."
        )
    return tuple(index for index, each in enumerate(types) if each == kind)


def text_entries(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the entries of the language model, which multimodal configurations contain as `text_config`."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UserError(f"config.json has text_config = {text!r}; expected an object.")
    if text is not config:
        text = {**text, "quantization_config": config.get("quantization_config")}
    return {str(key): value for key, value in text.items()}


def require_equal_tying(config: HuggingFaceConfig, *, default: bool) -> None:
    """Raise a `UserError` if a multimodal configuration and its `text_config` differ in `tie_word_embeddings`.

    `transformers` uses the outer entry; `default` is the value of both if they are missing.
    """
    outer, inner = (each.get("tie_word_embeddings", default) for each in (config, text_entries(config)))
    if outer != inner:
        raise UserError(
            f"config.json has tie_word_embeddings = {outer!r}, but {inner!r} in text_config; expected equal values: "
            "transformers uses the outer one."
        )


def has_windows(config: HuggingFaceConfig) -> bool:
    """Return True if layers of a Qwen2 or Qwen3 model may have windows: `sliding_window = null` means none."""
    is_on = config_value(config, "use_sliding_window", bool, default=False)
    return is_on and config.get("sliding_window", DEFAULT_WINDOW) is not None


def read_windows(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the windows of Qwen2 and Qwen3: by `layer_types`, or else all layers from `max_window_layers` on.

    Without causality, `transformers` excludes the current position from the window size.
    """
    is_sliding = has_windows(config)
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
    window = config_value(config, "sliding_window", int, default=DEFAULT_WINDOW) + (not values.get("is_causal", True))
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


def read_one_window(window: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hyperparameters of a model whose layers all have a sliding window of this size."""
    return {"sliding_window": window, "sliding_layers": tuple(range(values["num_layers"]))}


def written_layer_types(params: GroupedQueryParams) -> list[JsonValue]:
    """Return the entry `layer_types`."""
    return [params.mixer_kind(index) for index in range(params.num_layers)]


def require_known_keys(
    config: HuggingFaceConfig, *, used: Collection[str], irrelevant: Mapping[str, str], where: str = "config.json"
) -> None:
    """Raise a `UserError` that names all unknown entries of a configuration, which would otherwise have no effect.

    An entry is known if the caller reads it (`used`), or if it does not change the model (`irrelevant`).
    """
    unknown = {key: value for key, value in config.items() if key not in used and key not in irrelevant}
    if unknown:
        entries = ", ".join(f"{key} = {value!r}" for key, value in unknown.items())
        raise UserError(
            f"{where} has {entries}; expected only known entries. If an entry does not affect the model, delete it "
            "from the mapping before passing it."
        )


@contextmanager
def config_keys_in_errors(keys: Mapping[str, str]) -> Generator[None]:
    """Append the names of `config.json` entries to each `UserError` that mentions their fields."""
    try:
        yield
    except UserError as error:
        named = [
            f"{field} is {key}"
            for field, key in keys.items()
            if field != key and re.search(rf"\b{field}\b", str(error))
        ]
        if not named:
            raise
        raise UserError(f"{error} In config.json {', '.join(named)}.") from error
