"""Mistral (arXiv:2310.06825): grouped-query attention, in version 0.1 with a sliding window, RoPE, SwiGLU, RMS norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, read_one_window


@final
@dataclass(frozen=True, kw_only=True)
class MistralParams(GroupedQueryParams):
    """Hyperparameters of a Mistral model; see `GroupedQueryParams`. Either all layers have a window or none."""

    max_position_embeddings: int = 32768


def _read_window(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("sliding_window", 0) is None:
        return {}
    return read_one_window(config_value(config, "sliding_window", int, default=4096), values)


MISTRAL = hf.HuggingFaceFamily(
    params=MistralParams,
    architecture="MistralForCausalLM",
    model_type="mistral",
    entries=hf.with_defaults(hf.MULTI_HEAD_ENTRIES, num_kv_heads=8, max_position_embeddings=131_072),
    fixed=hf.FIXED_ENTRIES,
    own=("sliding_window",),
    read_own=_read_window,
    write_own=lambda params: {"sliding_window": params.sliding_window},
)
"""Checkpoints of Mistral."""
