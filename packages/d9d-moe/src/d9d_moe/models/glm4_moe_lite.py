"""GLM-4.7-Flash: the architecture of DeepSeek-V3, with other defaults and `mlp_layer_types` in `config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from d9d_dist.errors import UserError
from d9d_modules.models.hugging_face_config import HuggingFaceConfig
from d9d_modules.models.hugging_face_family import with_defaults
from d9d_moe.models.deepseek_v3 import DEEPSEEK_V3, DeepseekV3Params
from d9d_state import JsonValue


def _layer_types(num_layers: int, num_dense_layers: int) -> list[JsonValue]:
    return ["dense" if index < num_dense_layers else "sparse" for index in range(num_layers)]


def _read_own(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the kinds of feed-forward blocks; `transformers` ignores `first_k_dense_replace` of released files."""
    read = DEEPSEEK_V3.read_own(config, values)
    types, num_layers = config.get("mlp_layer_types"), values["num_layers"]
    if types is None:
        types = _layer_types(num_layers, 1)
    num_dense = types.count("dense") if isinstance(types, list) else 0
    if types != _layer_types(num_layers, num_dense):
        raise UserError(
            f"config.json has mlp_layer_types = {types!r}; expected num_hidden_layers = {num_layers} items, 'dense' in "
            "the first layers and 'sparse' in the others."
        )
    if config.get("first_k_dense_replace", num_dense) != num_dense:
        raise UserError(
            f"config.json has first_k_dense_replace = {config['first_k_dense_replace']!r}, but mlp_layer_types has "
            f"{num_dense} dense layers, which transformers uses; expected equal numbers."
        )
    return {**read, "num_dense_layers": num_dense}


def _written(params: DeepseekV3Params) -> Mapping[str, JsonValue]:
    types = _layer_types(params.num_layers, params.num_dense_layers)
    return {**DEEPSEEK_V3.write_own(params), "mlp_layer_types": types}


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    entries=with_defaults(
        DEEPSEEK_V3.entries,
        rms_norm_eps=1e-5,
        num_dense_layers=1,
        num_groups=1,
        top_groups=1,
        routed_scale=1.8,
        max_position_embeddings=202_752,
    ),
    own=(*DEEPSEEK_V3.own, "mlp_layer_types"),
    read_own=_read_own,
    write_own=_written,
    has_classifier=False,
)
"""`config.json` of GLM-4.7-Flash."""
