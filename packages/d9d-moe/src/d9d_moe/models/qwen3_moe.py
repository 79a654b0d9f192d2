"""Qwen3-MoE, arXiv:2505.09388: the Qwen3 decoder with mixture-of-experts feed-forward blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from d9d_dist.errors import UserError
from d9d_modules import (
    FIXED_ENTRIES,
    GROUPED_QUERY_ENTRIES,
    AttentionForm,
    DecoderForCausalLM,
    Entry,
    GroupedQueryParams,
    HuggingFaceConfig,
    HuggingFaceFamily,
    check_layers,
    config_value,
)
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT
from d9d_modules.models.hugging_face_layers import sliding_window_of
from d9d_moe.models.experts_hugging_face import ExpertsLayout, expert_entries, refuse_router_loss
from d9d_moe.models.sparse_params import SparseParams, sparse_from_hugging_face
from d9d_moe.router import TopKRouter
from d9d_state import JsonValue, StateMapper

Qwen3MoeForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3MoeParams(SparseParams, GroupedQueryParams):
    """Hyperparameters of a Qwen3-MoE model; see also `SparseParams` and `d9d_modules.GroupedQueryParams`.

    Attributes:
        dense_layers: Indices of the layers with a dense feed-forward block.
    """

    dense_layers: tuple[int, ...] = ()
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("dense_layers", self.dense_layers, self.num_layers)

    @property
    def attention_form(self) -> AttentionForm:
        """See `d9d_modules.GroupedQueryParams`."""
        return AttentionForm(qk_norm=True)

    def is_dense(self, index: int) -> bool:
        """See `SparseParams`."""
        return index in self.dense_layers

    def router(self) -> TopKRouter:
        """See `SparseParams`."""
        return TopKRouter(
            self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            renormalize=self.renormalize,
            init_std=self.initializer_range,
        )


def qwen3_moe_from_hugging_face(params: Qwen3MoeParams, *, layout: ExpertsLayout = "per_expert") -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `Qwen3MoeForCausalLM`; its `inverse()` exports."""
    return sparse_from_hugging_face(params, layout=layout)


def qwen3_moe_hugging_face_config(params: Qwen3MoeParams) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Qwen3MoeForCausalLM`, for `transformers` and inference engines.

    Raises:
        UserError: If a `config.json` cannot express the RoPE scaling, or only some layers have a sliding window.
    """
    return QWEN3_MOE.write(params)


def qwen3_moe_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3MoeParams:
    """Read the hyperparameters of a Qwen3-MoE model from its `config.json`; errors as in `HuggingFaceFamily.read`."""
    return QWEN3_MOE.read(config)


def read_dense_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Read the indices of the dense layers: `mlp_only_layers`, and those that `decoder_sparse_step` skips."""
    named = config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(index) is int and index in range(num_layers) for index in named):
        raise UserError(
            f"config.json has mlp_only_layers = {named!r}; expected a list of layer indices from 0 to {num_layers - 1}."
        )
    step = config_value(config, "decoder_sparse_step", int, default=1)
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def _read_layers(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the indices of the dense layers, and the sliding window of all layers."""
    num_layers = values["num_layers"]
    dense = read_dense_layers(config, num_layers)
    if not config_value(config, "use_sliding_window", bool, default=False):
        return {"dense_layers": dense}
    window = sliding_window_of(config)
    return {"dense_layers": dense, "sliding_window": window, "sliding_layers": tuple(range(num_layers))}


def _written_layers(params: Qwen3MoeParams) -> Mapping[str, JsonValue]:
    written: dict[str, JsonValue] = {"mlp_only_layers": list(params.dense_layers)}
    if params.sliding_window is None:
        return {**written, "use_sliding_window": False, "sliding_window": None}
    if len(set(params.sliding_layers)) < params.num_layers:
        raise UserError(
            f"sliding_layers = {params.sliding_layers} of {params.num_layers} layers; a config.json of Qwen3-MoE has "
            "one window for all layers: expected all layers, or none."
        )
    return {
        **written,
        "use_sliding_window": True,
        "sliding_window": params.sliding_window,
        "max_window_layers": 0,
    }


QWEN3_MOE = HuggingFaceFamily(
    params=Qwen3MoeParams,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    entries=(
        *GROUPED_QUERY_ENTRIES,
        *expert_entries("num_experts"),
        Entry("renormalize", "norm_topk_prob", bool, default=False),
        Entry("max_position_embeddings", "max_position_embeddings", default=32768),
    ),
    fixed=FIXED_ENTRIES,
    written={"decoder_sparse_step": 1},
    own=(
        "decoder_sparse_step",
        "mlp_only_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "sliding_window",
        "use_sliding_window",
    ),
    check=refuse_router_loss,
    read_own=_read_layers,
    write_own=_written_layers,
    irrelevant={
        **IRRELEVANT,
        "max_window_layers": "transformers applies the window to all layers of this family, or to none",
    },
)
"""`config.json` of Qwen3-MoE."""
