"""Llama 3 (arXiv:2407.21783), including 3.1 and 3.2: grouped-query attention, RoPE, SwiGLU, RMS norm.

Releases from 3.1 on use `Llama3Scaling`; the small 3.2 models tie the language-model head to the embedding.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.decoder_heads import DecoderForCausalLM
from d9d_modules.models.grouped_query import GroupedQueryParams

Llama3ForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Llama3Params(GroupedQueryParams):
    """Hyperparameters of a Llama 3 model; see `GroupedQueryParams`. Released models have no sliding windows."""

    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192


LLAMA3 = hf.HuggingFaceFamily(
    params=Llama3Params,
    architecture="LlamaForCausalLM",
    model_type="llama",
    entries=hf.with_defaults(hf.MULTI_HEAD_ENTRIES, max_position_embeddings=2048),
    fixed={**hf.UNBIASED_ENTRIES, "mlp_bias": False},
)
"""Checkpoints of Llama 3."""
