"""Qwen3, dense (arXiv:2505.09388): grouped-query attention with QK norm, RoPE, SwiGLU, RMS norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_heads import DecoderForCausalLM
from d9d_modules.models.decoder_hugging_face import decoder_from_hugging_face
from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layer_types_of
from d9d_modules.models.hugging_face_family import FIXED_ENTRIES, GROUPED_QUERY_ENTRIES, Entry, HuggingFaceFamily
from d9d_state import JsonValue, StateMapper

Qwen3ForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3Params(GroupedQueryParams):
    """Hyperparameters of a Qwen3 model; see `GroupedQueryParams`."""

    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qk_norm=True)


def qwen3_from_hugging_face(params: Qwen3Params) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `Qwen3ForCausalLM`; its `inverse()` exports."""
    return decoder_from_hugging_face(params)


def qwen3_hugging_face_config(params: Qwen3Params) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Qwen3ForCausalLM` for `transformers` and inference engines.

    Raises:
        UserError: If `config.json` cannot represent the RoPE scaling.
    """
    return QWEN3.write(params)


def qwen3_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3Params:
    """Read the hyperparameters of a Qwen3 model from its `config.json`; errors as in `HuggingFaceFamily.read`."""
    return QWEN3.read(config)


def sliding_window_of(config: HuggingFaceConfig) -> int:
    """Read the window size of a configuration with sliding windows; raise a `UserError` if it is missing or invalid."""
    if config.get("sliding_window") is None:
        raise UserError(
            "config.json has no 'sliding_window', but use_sliding_window = True; expected the window size in positions."
        )
    return config_value(config, "sliding_window", int)


def _read_sliding(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    layers = _sliding_layers(config, values["num_layers"])
    return {"sliding_window": sliding_window_of(config), "sliding_layers": layers} if layers else {}


def _sliding_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a sliding window: by `layer_types`, or else all layers from `max_window_layers` on."""
    is_sliding = config_value(config, "use_sliding_window", bool, default=False)
    known = ("full_attention", "sliding_attention")
    types = layer_types_of(config, num_layers, known=known)
    if types is None:
        first = config_value(config, "max_window_layers", int, default=28, minimum=0)
        return tuple(range(first, num_layers)) if is_sliding else ()
    if not is_sliding and known[1] in types:
        raise UserError(
            f"config.json has layer_types = {types!r} and use_sliding_window = False; expected no {known[1]!r}, or "
            "use_sliding_window = True with a sliding_window."
        )
    return tuple(index for index, each in enumerate(types) if each == "sliding_attention")


def _written_sliding(params: Qwen3Params) -> Mapping[str, JsonValue]:
    """Return all three window entries, even without windows, to override those of the original `config.json`."""
    if params.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    layers = range(params.num_layers)
    types = ["sliding_attention" if index in params.sliding_layers else "full_attention" for index in layers]
    return {"use_sliding_window": True, "sliding_window": params.sliding_window, "layer_types": types}


QWEN3 = HuggingFaceFamily(
    params=Qwen3Params,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    entries=(*GROUPED_QUERY_ENTRIES, Entry("max_position_embeddings", "max_position_embeddings", default=32768)),
    fixed=FIXED_ENTRIES,
    own=("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    read_own=_read_sliding,
    write_own=_written_sliding,
)
"""`config.json` of Qwen3."""
