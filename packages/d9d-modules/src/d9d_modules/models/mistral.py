"""Mistral (arXiv:2310.06825): grouped-query attention, in version 0.1 with a sliding window, RoPE, SwiGLU, RMS norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value
from d9d_modules.models.hugging_face_family import (
    DECODER_ENTRIES,
    HEAD_DIM_ENTRY,
    Entry,
    HuggingFaceFamily,
    positions_entry,
)
from d9d_modules.models.hugging_face_layers import read_one_window, require_one_window
from d9d_state import JsonValue


@final
@dataclass(frozen=True, kw_only=True)
class MistralParams(GroupedQueryParams):
    """Hyperparameters of a Mistral model; see `GroupedQueryParams`. All layers have the sliding window, or none."""

    max_position_embeddings: int = 32768


def _read_window(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("sliding_window", 0) is None:
        return {}
    return read_one_window(config_value(config, "sliding_window", int, default=4096), values)


def _written_window(params: MistralParams) -> Mapping[str, JsonValue]:
    require_one_window(params)
    return {"sliding_window": params.sliding_window}


MISTRAL = HuggingFaceFamily(
    params=MistralParams,
    architecture="MistralForCausalLM",
    model_type="mistral",
    entries=(
        *DECODER_ENTRIES,
        Entry("num_kv_heads", "num_key_value_heads", default=8),
        HEAD_DIM_ENTRY,
        positions_entry(131_072),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    own=("sliding_window",),
    read_own=_read_window,
    write_own=_written_window,
)
"""Checkpoints of Mistral."""
