"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): grouped-query attention with partial RoPE, experts as in DeepSeek-V3."""

from dataclasses import dataclass
from typing import final

from d9d_modules import GroupedQueryParams
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import AttentionForm
from d9d_moe.models.deepseek_moe import (
    DEEPSEEK_MOE_ENTRIES,
    DEEPSEEK_MOE_IRRELEVANT,
    DEEPSEEK_MOE_UNUSED,
    DeepseekMoeParams,
)


@final
@dataclass(frozen=True, kw_only=True)
class Glm4MoeParams(DeepseekMoeParams, GroupedQueryParams):
    """Hyperparameters of a GLM-4.5 model; see `DeepseekMoeParams` and `d9d_modules.GroupedQueryParams`.

    `sparse_from_hugging_face` maps its weights; `GLM4_MOE` reads and writes its `config.json`.

    Attributes:
        rotary_dim: Number of leading features of each head to rotate.
        has_qkv_bias: True if the query, key and value projections have biases.
        has_qk_norm: True if each query and key head has an RMS norm.
    """

    rotary_dim: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072

    @property
    def attention_form(self) -> AttentionForm:
        """See `d9d_modules.GroupedQueryParams`."""
        return AttentionForm(qkv_bias=self.has_qkv_bias, qk_norm=self.has_qk_norm, rotary_dim=self.rotary_dim)


GLM4_MOE = hf.HuggingFaceFamily(
    params=Glm4MoeParams,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    entries=(
        *hf.with_defaults(hf.MULTI_HEAD_ENTRIES, num_kv_heads=None, rms_norm_eps=1e-5, max_position_embeddings=131_072),
        *DEEPSEEK_MOE_ENTRIES,
        hf.Entry("has_qkv_bias", "attention_bias", bool, default=False),
        hf.Entry("has_qk_norm", "use_qk_norm", bool, default=False),
    ),
    fixed=hf.FIXED_ENTRIES,
    written={"num_nextn_predict_layers": 0, "num_mtp_layers": 0},
    irrelevant=DEEPSEEK_MOE_IRRELEVANT,
    unused=DEEPSEEK_MOE_UNUSED,
    rotary_factor=0.5,
    has_classifier=False,
)
"""`config.json` of GLM-4.5, 4.6 and 4.7 with experts."""
