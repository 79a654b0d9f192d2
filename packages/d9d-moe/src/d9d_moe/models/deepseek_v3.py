"""DeepSeek-V3, arXiv:2412.19437: latent attention, dense layers, then layers with shared and routed experts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from torch import nn

from d9d_dist.errors import UserError
from d9d_modules import AttentionOptions, DecoderForCausalLM, MultiHeadLatentAttention, YarnScaling
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value
from d9d_modules.rope import RotaryLayout
from d9d_moe.models.deepseek_moe import (
    DEEPSEEK_MOE_ENTRIES,
    DEEPSEEK_MOE_IRRELEVANT,
    DEEPSEEK_MOE_UNUSED,
    DeepseekMoeParams,
)
from d9d_state import JsonValue, StateMapper, rename_all

DeepseekV3ForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class DeepseekV3Params(DeepseekMoeParams):
    """Hyperparameters of a DeepSeek-V3, Kimi K2 or Moonlight model; see also `DeepseekMoeParams`.

    The paper uses a small sequence-level balance loss. YaRN with `mscale_all_dim` also changes the softmax scale.

    Attributes:
        q_rank: Size of the latent vector of queries; None projects queries from the hidden states directly.
        head_dim: Features per head of queries and keys without RoPE.
        rotary_dim: Features per head of queries and keys with RoPE; even.
    """

    num_heads: int
    kv_rank: int
    q_rank: int | None
    head_dim: int
    rotary_dim: int
    value_dim: int
    rotary_layout: RotaryLayout = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim % 2:
            raise UserError(
                f"rotary_dim = {self.rotary_dim}; expected an even number, because RoPE rotates pairs of features."
            )

    @property
    def rotated_features(self) -> int:
        """See `DecoderParams`."""
        return self.rotary_dim

    def mixer(self, index: int) -> nn.Module:
        """See `DecoderParams`; the attention is the same in all layers."""
        scale = (self.head_dim + self.rotary_dim) ** -0.5
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.mscale_all_dim:
            scale *= self.rope_scaling.temperature(self.rope_scaling.mscale_all_dim) ** 2
        return MultiHeadLatentAttention(
            self.hidden_size,
            num_heads=self.num_heads,
            kv_rank=self.kv_rank,
            q_rank=self.q_rank,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            value_dim=self.value_dim,
            rotary_layout=self.rotary_layout,
            options=AttentionOptions(scale=scale),
            init_std=self.initializer_range,
        )

    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`."""
        queries = {"q_a_proj": "q_down_proj", "q_a_layernorm": "q_norm", "q_b_proj": "q_up_proj"}
        names = {
            **({"q_proj": "q_proj"} if self.q_rank is None else queries),
            "kv_a_proj_with_mqa": "kv_down_proj",
            "kv_a_layernorm": "kv_norm",
            "kv_b_proj": "kv_up_proj",
            "o_proj": "o_proj",
        }
        return rename_all({f"self_attn.{theirs}.weight": f"attention.{ours}.weight" for theirs, ours in names.items()})


def _check(config: HuggingFaceConfig) -> None:
    """Raise a `UserError` for sizes that contradict other entries."""
    rotary_dim, nope_dim = (config_value(config, f"qk_{part}_head_dim", int) for part in ("rope", "nope"))
    for key, implied, source in (
        ("head_dim", rotary_dim, "qk_rope_head_dim"),
        ("qk_head_dim", nope_dim + rotary_dim, "qk_nope_head_dim + qk_rope_head_dim"),
        ("num_key_value_heads", config_value(config, "num_attention_heads", int), "num_attention_heads"),
    ):
        value = config.get(key)
        if value is not None and (value != implied or isinstance(value, bool)):
            raise UserError(
                f"config.json has {key} = {value!r}; expected {source} = {implied}, or no entry {key!r}. Correct or "
                "remove it."
            )


def _read_attention(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    is_interleaved = config_value(config, "rope_interleave", bool, default=True)
    return {
        # Null means queries without a latent vector, but a missing entry is an error.
        "q_rank": None if config.get("q_lora_rank", 0) is None else config_value(config, "q_lora_rank", int),
        "rotary_layout": "interleaved" if is_interleaved else "half",
    }


def _written_attention(params: DeepseekV3Params) -> Mapping[str, JsonValue]:
    return {
        "num_key_value_heads": params.num_heads,
        "q_lora_rank": params.q_rank,
        "qk_head_dim": params.head_dim + params.rotary_dim,
        "head_dim": params.rotary_dim,
        "rope_interleave": params.rotary_layout == "interleaved",
    }


DEEPSEEK_V3 = hf.HuggingFaceFamily(
    params=DeepseekV3Params,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    entries=(
        *hf.with_defaults(hf.DECODER_ENTRIES, max_position_embeddings=4096),
        *hf.with_defaults(DEEPSEEK_MOE_ENTRIES, num_groups=8, top_groups=4, routed_scale=2.5, num_dense_layers=None),
        hf.Entry("kv_rank", "kv_lora_rank"),
        hf.Entry("head_dim", "qk_nope_head_dim"),
        hf.Entry("rotary_dim", "qk_rope_head_dim"),
        hf.Entry("value_dim", "v_head_dim"),
    ),
    fixed={**hf.UNBIASED_ENTRIES, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    written={"num_nextn_predict_layers": 0, "num_mtp_layers": 0},
    own=("head_dim", "num_key_value_heads", "q_lora_rank", "qk_head_dim", "rope_interleave"),
    check=_check,
    read_own=_read_attention,
    write_own=_written_attention,
    irrelevant=DEEPSEEK_MOE_IRRELEVANT,
    unused=DEEPSEEK_MOE_UNUSED,
)
"""`config.json` of DeepSeek-V3."""

KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    # transformers has no class of this name: it loads an export as DeepSeek-V3.
    written={**DEEPSEEK_V3.written, "model_type": DEEPSEEK_V3.model_type},
    prepare=lambda config: (
        {**config, "model_type": "kimi_k2"} if config.get("model_type") == DEEPSEEK_V3.model_type else config
    ),
)
"""`config.json` of Kimi K2 (arXiv:2507.20534), which has the architecture of DeepSeek-V3 and is exported as such."""
