"""Qwen3-MoE, arXiv:2505.09388: the Qwen3 decoder with mixture-of-experts feed-forward blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from d9d_dist.errors import UserError
from d9d_modules import DecoderForCausalLM, GroupedQueryParams
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import AttentionForm
from d9d_modules.models.hugging_face_config import (
    DEFAULT_WINDOW,
    HuggingFaceConfig,
    config_value,
    has_windows,
    read_one_window,
)
from d9d_moe.models.experts_hugging_face import expert_entries, read_router_losses, written_router_losses
from d9d_moe.models.sparse_params import SoftmaxRoutedParams
from d9d_state import JsonValue

Qwen3MoeForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3MoeParams(SoftmaxRoutedParams, GroupedQueryParams):
    """Hyperparameters of a Qwen3-MoE model; see `SoftmaxRoutedParams` and `d9d_modules.GroupedQueryParams`."""

    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768

    @property
    def attention_form(self) -> AttentionForm:
        """See `d9d_modules.GroupedQueryParams`."""
        return AttentionForm(qk_norm=True)


def read_dense_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Read the indices of the dense layers: `mlp_only_layers`, and the layers that `decoder_sparse_step` skips."""
    named = config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(index) is int and index in range(num_layers) for index in named):
        raise UserError(
            f"config.json has mlp_only_layers = {named!r}; expected a list of layer indices from 0 to {num_layers - 1}."
        )
    step = config_value(config, "decoder_sparse_step", int, default=1)
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def _read_layers(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the indices of the dense layers, the sliding window of all layers, and the balance loss."""
    is_sliding = has_windows(config)
    size = config_value(config, "sliding_window", int, default=DEFAULT_WINDOW) if is_sliding else None
    window = {} if size is None else read_one_window(size, values)
    return {"dense_layers": read_dense_layers(config, values["num_layers"]), **window, **read_router_losses(config)}


def _written_layers(params: Qwen3MoeParams) -> Mapping[str, JsonValue]:
    window = params.sliding_window
    return {
        "mlp_only_layers": list(params.dense_layers),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        **({} if window is None else {"max_window_layers": 0}),
        **written_router_losses(params.router_losses),
    }


QWEN3_MOE = hf.HuggingFaceFamily(
    params=Qwen3MoeParams,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    entries=(
        *hf.with_defaults(hf.GROUPED_QUERY_ENTRIES, max_position_embeddings=32768, head_dim=hf.split_head_dim),
        *expert_entries("num_experts"),
        hf.Entry("renormalize", "norm_topk_prob", bool, default=False),
    ),
    fixed=hf.UNBIASED_ENTRIES,
    written={"decoder_sparse_step": 1},
    own=(
        "decoder_sparse_step",
        "mlp_only_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "sliding_window",
        "use_sliding_window",
    ),
    read_own=_read_layers,
    write_own=_written_layers,
    irrelevant={"max_window_layers": "transformers applies the window to all layers of this family, or to none"},
)
"""`config.json` of Qwen3-MoE."""
