"""GPT-OSS (arXiv:2508.10925): attention sinks, alternating sliding windows, biases, and clamped SwiGLU experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from d9d_dist.errors import UserError
from d9d_modules import GroupedQueryParams
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_params import RopeScaling
from d9d_modules.models.grouped_query import AttentionForm
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layers_of_kind, written_layer_types
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face
from d9d_moe.experts import Experts, GroupedClampedSwiGLU
from d9d_moe.models.experts_hugging_face import ExpertsLayout, read_router_losses, written_router_losses
from d9d_moe.models.sparse_params import SparseParams
from d9d_moe.router import TopKRouter
from d9d_state import JsonValue, StateMapper, identity, parallel, rename_all, transpose

_DEFAULT_WINDOW = 128
_DEFAULT_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@final
@dataclass(frozen=True, kw_only=True)
class GptOssParams(SparseParams, GroupedQueryParams):
    """Hyperparameters of a GPT-OSS model; see `SparseParams` and `d9d_modules.GroupedQueryParams`.

    `sparse_from_hugging_face` maps its weights; `GPT_OSS` reads and writes its `config.json`. All layers are MoE;
    `intermediate_size` must equal `expert_intermediate_size`.

    Attributes:
        has_attention_bias: True if all projections of the attention have biases.
        swiglu_alpha: See `GroupedClampedSwiGLU`.
        swiglu_limit: See `GroupedClampedSwiGLU`.
    """

    has_attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate_size != self.expert_intermediate_size:
            raise UserError(
                f"intermediate_size = {self.intermediate_size}, expert_intermediate_size = "
                f"{self.expert_intermediate_size}; expected equal numbers, since all layers have experts."
            )
        if not self.renormalize:
            raise UserError("renormalize = False; expected True: GPT-OSS applies softmax to the chosen experts.")

    @property
    def attention_form(self) -> AttentionForm:
        """See `d9d_modules.GroupedQueryParams`."""
        return AttentionForm(qkv_bias=self.has_attention_bias, output_bias=self.has_attention_bias, sinks=True)

    def is_dense(self, index: int) -> bool:
        """See `SparseParams`."""
        return False

    def router(self) -> TopKRouter:
        """See `SparseParams`."""
        return TopKRouter(
            self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            bias=True,
            init_std=self.initializer_range,
        )

    def experts(self) -> Experts:
        """See `SparseParams`."""
        return GroupedClampedSwiGLU(
            self.num_experts,
            self.hidden_size,
            self.expert_intermediate_size,
            alpha=self.swiglu_alpha,
            limit=self.swiglu_limit,
            init_std=self.initializer_range,
        )

    def moe_from_hugging_face(self, layout: ExpertsLayout) -> StateMapper:
        """See `SparseParams`; checkpoints have one layout, so `layout` has no effect."""
        projections = ("experts.gate_up_proj", "experts.down_proj")
        return parallel(
            identity("router.weight", "router.bias"),
            *(transpose(name, f"{name}.weight", dim0=1, dim1=2) for name in projections),
            rename_all({f"{name}_bias": f"{name}.bias" for name in projections}),
        )


def _check(config: HuggingFaceConfig) -> None:
    config_value(config, "num_experts_per_tok", int)  # transformers does not read experts_per_token


def _read_rope(config: HuggingFaceConfig, *, rotary_factor: float) -> tuple[float, RopeScaling | None]:
    """Read RoPE base and scaling; without an entry about the scaling, `transformers` uses YaRN."""
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _DEFAULT_SCALING}
    return rope_from_hugging_face(config, rotary_factor=rotary_factor)


def _read_layers(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    num_layers = values["num_layers"]
    sliding = layers_of_kind(config, num_layers, "sliding_attention", default=lambda index: index % 2 == 0)
    window = {"sliding_window": config_value(config, "sliding_window", int, default=_DEFAULT_WINDOW)} if sliding else {}
    own = {"intermediate_size": values["expert_intermediate_size"], "sliding_layers": sliding, **window}
    return {**own, **read_router_losses(config)}


def _written_layers(params: GptOssParams) -> Mapping[str, JsonValue]:
    # transformers needs a window size even if no layer has a window.
    window = params.sliding_window or _DEFAULT_WINDOW
    layers = {"sliding_window": window, "layer_types": written_layer_types(params)}
    return {**layers, **written_router_losses(params.router_losses)}


GPT_OSS = hf.HuggingFaceFamily(
    params=GptOssParams,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    entries=(
        *hf.with_defaults(hf.GROUPED_QUERY_ENTRIES, rms_norm_eps=1e-5, head_dim=64, max_position_embeddings=131_072),
        hf.Entry("expert_intermediate_size", "intermediate_size"),
        hf.Entry("num_experts", "num_local_experts", alias="num_experts"),
        hf.Entry("top_k", "num_experts_per_tok", alias="experts_per_token"),
        hf.Entry("has_attention_bias", "attention_bias", bool, default=True),
        hf.Entry("swiglu_alpha", "swiglu_alpha", float, 1.702),
        hf.Entry("swiglu_limit", "swiglu_limit", float, 7.0),
    ),
    fixed=hf.FIXED_ENTRIES,
    own=("layer_types", "output_router_logits", "router_aux_loss_coef", "sliding_window"),
    check=_check,
    read_rope=_read_rope,
    read_own=_read_layers,
    write_own=_written_layers,
    irrelevant={"initial_context_length": "the RoPE scaling has the same number"},
)
"""`config.json` of GPT-OSS."""
