"""Qwen2 and Qwen2.5, dense (arXiv:2407.10671): grouped-query attention with QKV biases, RoPE, SwiGLU, RMS norm."""

from dataclasses import dataclass
from typing import final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
from d9d_modules.models.hugging_face_config import WINDOW_ENTRIES, read_windows, written_windows


@final
@dataclass(frozen=True, kw_only=True)
class Qwen2Params(GroupedQueryParams):
    """Hyperparameters of a Qwen2 or Qwen2.5 model; see `GroupedQueryParams`."""

    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qkv_bias=True)


QWEN2 = hf.HuggingFaceFamily(
    params=Qwen2Params,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    entries=hf.with_defaults(hf.MULTI_HEAD_ENTRIES, num_kv_heads=32, max_position_embeddings=32768),
    fixed={**hf.FIXED_ENTRIES, "use_mrope": False},
    own=WINDOW_ENTRIES,
    read_own=read_windows,
    write_own=written_windows,
)
"""Checkpoints of Qwen2 and Qwen2.5."""
