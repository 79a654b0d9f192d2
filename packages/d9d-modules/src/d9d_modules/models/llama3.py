"""Llama 3 (arXiv:2407.21783), including 3.1 and 3.2: grouped-query attention, RoPE, SwiGLU, RMS norm.

Releases from 3.1 on use `Llama3Scaling`; the small 3.2 models tie the language-model head to the embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from d9d_modules.models.decoder_heads import DecoderForCausalLM
from d9d_modules.models.decoder_hugging_face import decoder_from_hugging_face
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig
from d9d_modules.models.hugging_face_family import DECODER_ENTRIES, FIXED_ENTRIES, Entry, HuggingFaceFamily
from d9d_state import JsonValue, StateMapper

Llama3ForCausalLM: TypeAlias = DecoderForCausalLM


@final
@dataclass(frozen=True, kw_only=True)
class Llama3Params(GroupedQueryParams):
    """Hyperparameters of a Llama 3 model; see `GroupedQueryParams`. Released models have no sliding windows."""

    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192


def llama3_from_hugging_face(params: Llama3Params) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `Llama3ForCausalLM`; its `inverse()` exports."""
    return decoder_from_hugging_face(params)


def llama3_hugging_face_config(params: Llama3Params) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Llama3ForCausalLM` for `transformers` and inference engines.

    `transformers` loads only models whose number of heads divides the hidden size.

    Raises:
        UserError: If `config.json` cannot represent the RoPE scaling or a sliding window.
    """
    return LLAMA3.write(params)


def llama3_params_from_hugging_face(config: HuggingFaceConfig) -> Llama3Params:
    """Read the hyperparameters of a Llama 3 model from its `config.json`; errors as in `HuggingFaceFamily.read`."""
    return LLAMA3.read(config)


def _refuse_windows(params: Llama3Params) -> Mapping[str, JsonValue]:
    params.require_no_windows()
    return {}


LLAMA3 = HuggingFaceFamily(
    params=Llama3Params,
    architecture="LlamaForCausalLM",
    model_type="llama",
    entries=(
        *DECODER_ENTRIES,
        Entry("num_kv_heads", "num_key_value_heads", default=lambda values: values["num_heads"]),
        Entry("head_dim", "head_dim", default=lambda values: values["hidden_size"] // values["num_heads"]),
        Entry("max_position_embeddings", "max_position_embeddings", default=2048),
    ),
    fixed={**FIXED_ENTRIES, "mlp_bias": False},
    write_own=_refuse_windows,
)
"""`config.json` of Llama 3."""
