"""White-box transformer blocks and models for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_modules.attention import GroupedQueryAttention as GroupedQueryAttention
    from d9d_modules.attention_backends.backend import AttentionBackend as AttentionBackend
    from d9d_modules.attention_backends.backend import AttentionOptions as AttentionOptions
    from d9d_modules.attention_backends.backend import AttentionRequest as AttentionRequest
    from d9d_modules.attention_backends.choice import choose_attention_backend as choose_attention_backend
    from d9d_modules.attention_backends.choice import chosen_attention as chosen_attention
    from d9d_modules.attention_backends.choice import default_attention_backends as default_attention_backends
    from d9d_modules.attention_backends.eager import EagerBackend as EagerBackend
    from d9d_modules.attention_backends.visibility import documents_of_lengths as documents_of_lengths
    from d9d_modules.checkpointing import CheckpointPolicy as CheckpointPolicy
    from d9d_modules.checkpointing import checkpoint_activations as checkpoint_activations
    from d9d_modules.checkpointing import checkpoint_layers as checkpoint_layers
    from d9d_modules.checkpointing import default_saved_operators as default_saved_operators
    from d9d_modules.chunked_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from d9d_modules.compiling import compile_layers as compile_layers
    from d9d_modules.cross_entropy import CrossEntropy as CrossEntropy
    from d9d_modules.decay_gate import DecayGate as DecayGate
    from d9d_modules.decay_gate import LogSigmoidDecayGate as LogSigmoidDecayGate
    from d9d_modules.decoder import DecoderLayer as DecoderLayer
    from d9d_modules.delta_rule import gated_delta_rule as gated_delta_rule
    from d9d_modules.embedding import SplitTokenEmbedding as SplitTokenEmbedding
    from d9d_modules.embedding import TokenEmbedding as TokenEmbedding
    from d9d_modules.float8 import Float8 as Float8
    from d9d_modules.float8 import convert_to_float8 as convert_to_float8
    from d9d_modules.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from d9d_modules.generation import generate as generate
    from d9d_modules.latent_attention import MultiHeadLatentAttention as MultiHeadLatentAttention
    from d9d_modules.layer_means import LayerMeans as LayerMeans
    from d9d_modules.linear import Linear as Linear
    from d9d_modules.lm_head import IGNORED_LABEL as IGNORED_LABEL
    from d9d_modules.lm_head import LanguageModelHead as LanguageModelHead
    from d9d_modules.mixer_cache import SupportsCache as SupportsCache
    from d9d_modules.models.decoder_heads import DecoderForCausalLM as DecoderForCausalLM
    from d9d_modules.models.decoder_heads import DecoderForClassification as DecoderForClassification
    from d9d_modules.models.decoder_heads import DecoderForEmbedding as DecoderForEmbedding
    from d9d_modules.models.decoder_heads import DecoderWithHeads as DecoderWithHeads
    from d9d_modules.models.decoder_heads import decoder_lm_head as decoder_lm_head
    from d9d_modules.models.decoder_hugging_face import (
        decoder_backbone_from_hugging_face as decoder_backbone_from_hugging_face,
    )
    from d9d_modules.models.decoder_hugging_face import decoder_from_hugging_face as decoder_from_hugging_face
    from d9d_modules.models.decoder_model import DecoderModel as DecoderModel
    from d9d_modules.models.decoder_mtp import QWEN_MTP as QWEN_MTP
    from d9d_modules.models.decoder_mtp import DecoderWithMtp as DecoderWithMtp
    from d9d_modules.models.decoder_mtp import mtp_targets as mtp_targets
    from d9d_modules.models.decoder_parallelize import parallelize_decoder as parallelize_decoder
    from d9d_modules.models.decoder_params import DecoderParams as DecoderParams
    from d9d_modules.models.decoder_tensor_plan import WholeRows as WholeRows
    from d9d_modules.models.decoder_tensor_plan import decoder_tensor_plan as decoder_tensor_plan
    from d9d_modules.models.gemma3 import GEMMA3 as GEMMA3
    from d9d_modules.models.gemma3 import Gemma3Params as Gemma3Params
    from d9d_modules.models.glm4 import GLM4 as GLM4
    from d9d_modules.models.glm4 import Glm4Params as Glm4Params
    from d9d_modules.models.grouped_query import GroupedQueryParams as GroupedQueryParams
    from d9d_modules.models.hugging_face_family import HuggingFaceFamily as HuggingFaceFamily
    from d9d_modules.models.hugging_face_quantization import (
        quantization_from_hugging_face as quantization_from_hugging_face,
    )
    from d9d_modules.models.llama3 import LLAMA3 as LLAMA3
    from d9d_modules.models.llama3 import Llama3ForCausalLM as Llama3ForCausalLM
    from d9d_modules.models.llama3 import Llama3Params as Llama3Params
    from d9d_modules.models.mistral import MISTRAL as MISTRAL
    from d9d_modules.models.mistral import MistralParams as MistralParams
    from d9d_modules.models.modernbert import MODERNBERT as MODERNBERT
    from d9d_modules.models.modernbert import ModernBertParams as ModernBertParams
    from d9d_modules.models.pretrained import from_pretrained_config as from_pretrained_config
    from d9d_modules.models.qwen2 import QWEN2 as QWEN2
    from d9d_modules.models.qwen2 import Qwen2Params as Qwen2Params
    from d9d_modules.models.qwen3 import QWEN3 as QWEN3
    from d9d_modules.models.qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
    from d9d_modules.models.qwen3 import Qwen3Params as Qwen3Params
    from d9d_modules.models.qwen3_5 import QWEN3_5 as QWEN3_5
    from d9d_modules.models.qwen3_5 import Qwen35Params as Qwen35Params
    from d9d_modules.norm import GatedRMSNorm as GatedRMSNorm
    from d9d_modules.norm import LayerNorm as LayerNorm
    from d9d_modules.norm import RMSNorm as RMSNorm
    from d9d_modules.norm import add_rms_norm as add_rms_norm
    from d9d_modules.norm import rms_norm as rms_norm
    from d9d_modules.pooling import pool as pool
    from d9d_modules.rope import apply_rotary as apply_rotary
    from d9d_modules.rope import rotary_tables as rotary_tables
    from d9d_modules.rope_scaling import DynamicNtkScaling as DynamicNtkScaling
    from d9d_modules.rope_scaling import LinearScaling as LinearScaling
    from d9d_modules.rope_scaling import Llama3Scaling as Llama3Scaling
    from d9d_modules.rope_scaling import LongRopeScaling as LongRopeScaling
    from d9d_modules.rope_scaling import NtkScaling as NtkScaling
    from d9d_modules.rope_scaling import RotaryScaling as RotaryScaling
    from d9d_modules.rope_scaling import YarnScaling as YarnScaling
    from d9d_modules.sequence_heads import ClassificationHead as ClassificationHead
    from d9d_modules.sequence_heads import EmbeddingHead as EmbeddingHead
    from d9d_modules.swiglu import SwiGLU as SwiGLU
    from d9d_modules.swiglu import silu_mul as silu_mul
    from d9d_modules.vocabulary_scores import token_scores as token_scores
else:
    __getattr__, __dir__ = lazy_exports(__name__)
