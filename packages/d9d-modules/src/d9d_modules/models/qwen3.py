"""Qwen3, dense (arXiv:2505.09388): grouped-query attention with QK norm, RoPE, SwiGLU, RMS norm."""

from dataclasses import dataclass
from typing import TypeAlias, final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_heads import DecoderForCausalLM
from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
from d9d_modules.models.hugging_face_config import WINDOW_ENTRIES, read_windows, written_windows

Qwen3ForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3Params(GroupedQueryParams):
    """Hyperparameters of a Qwen3 model; see `GroupedQueryParams`.

    Attributes:
        is_causal: If False, all positions attend to each other, as in encoders and bidirectional embedders.
    """

    is_causal: bool = True
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 32768

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qk_norm=True, is_causal=self.is_causal)


QWEN3 = hf.HuggingFaceFamily(
    params=Qwen3Params,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    entries=(
        *hf.with_defaults(hf.GROUPED_QUERY_ENTRIES, max_position_embeddings=32768),
        hf.Entry("is_causal", "is_causal", bool, default=True),
    ),
    fixed=hf.UNBIASED_ENTRIES,
    own=WINDOW_ENTRIES,
    read_own=read_windows,
    write_own=written_windows,
)
"""Checkpoints of Qwen3."""
