"""GLM-4 of 2025, dense (GLM-4-9B-0414, GLM-4-32B-0414): sandwich norms, QKV biases, partial and interleaved RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
from d9d_state import StateMapper, parallel, rename, split


@final
@dataclass(frozen=True, kw_only=True)
class Glm4Params(GroupedQueryParams):
    """Hyperparameters of a GLM-4 model; see `GroupedQueryParams`. Released models have no sliding windows.

    Attributes:
        rotary_dim: Number of leading features of each head that RoPE rotates; even.
        qkv_bias: If True, the query, key and value projections have biases.
    """

    sandwich_norms: ClassVar[bool] = True
    hugging_face_norms: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_norm",
        "post_self_attn_layernorm": "attention_output_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "post_mlp_layernorm": "feed_forward_output_norm",
    }

    rotary_dim: int
    qkv_bias: bool = True
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32768

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qkv_bias=self.qkv_bias, rotary_dim=self.rotary_dim, rotary_layout="interleaved")

    def feed_forward_from_hugging_face(self, index: int) -> StateMapper:
        """See `DecoderParams`; gate and up projection are one fused matrix."""
        gate_up = split(
            "gate_up_proj.weight", ["gate_proj.weight", "up_proj.weight"], [self.intermediate_size] * 2, dim=0
        )
        return parallel(gate_up, rename("down_proj.weight", "down_proj.weight"))


GLM4 = hf.HuggingFaceFamily(
    params=Glm4Params,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    entries=(
        *hf.with_defaults(hf.GROUPED_QUERY_ENTRIES, rms_norm_eps=1.5625e-07, max_position_embeddings=131_072),
        hf.Entry("qkv_bias", "attention_bias", bool, default=True),
    ),
    fixed=hf.FIXED_ENTRIES,
    rotary_factor=0.5,
)
"""Checkpoints of GLM-4."""
