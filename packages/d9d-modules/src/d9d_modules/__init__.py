"""White-box transformer blocks and models for PyTorch."""

from d9d_modules.attention import GroupedQueryAttention
from d9d_modules.checkpointing import CheckpointPolicy, checkpoint_activations
from d9d_modules.decoder import DecoderLayer
from d9d_modules.embedding import TokenEmbedding
from d9d_modules.generate import generate
from d9d_modules.linear import Linear
from d9d_modules.lm_head import IGNORED_LABEL, LanguageModelHead, language_model_head
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_value
from d9d_modules.models.qwen3 import (
    WHOLE_MODEL,
    FeedForwardFactory,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3Params,
    qwen3_lm_head,
)
from d9d_modules.models.qwen3_hugging_face import (
    FeedForwardMapper,
    decoder_params_from_hugging_face,
    qwen3_from_hugging_face,
    qwen3_hugging_face_config,
    qwen3_params_from_hugging_face,
    swiglu_from_hugging_face,
)
from d9d_modules.models.qwen3_tensor_plan import qwen3_attention_tensor_plan, qwen3_tensor_plan
from d9d_modules.rms_norm import RMSNorm
from d9d_modules.rope import RotaryTables, apply_rotary, rotary_tables
from d9d_modules.swiglu import SwiGLU

__all__ = [
    "IGNORED_LABEL",
    "WHOLE_MODEL",
    "CheckpointPolicy",
    "DecoderLayer",
    "FeedForwardFactory",
    "FeedForwardMapper",
    "GroupedQueryAttention",
    "HuggingFaceConfig",
    "LanguageModelHead",
    "Linear",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen3Params",
    "RMSNorm",
    "RotaryTables",
    "SwiGLU",
    "TokenEmbedding",
    "apply_rotary",
    "checkpoint_activations",
    "config_value",
    "decoder_params_from_hugging_face",
    "generate",
    "language_model_head",
    "qwen3_attention_tensor_plan",
    "qwen3_from_hugging_face",
    "qwen3_hugging_face_config",
    "qwen3_lm_head",
    "qwen3_params_from_hugging_face",
    "qwen3_tensor_plan",
    "require_value",
    "rotary_tables",
    "swiglu_from_hugging_face",
]
