"""White-box transformer blocks and models for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_modules.attention import GroupedQueryAttention
    from d9d_modules.attention_backends import (
        ATTENTION_VARIABLE,
        AttentionBackend,
        AttentionBackendName,
        AttentionFeatures,
        AttentionOptions,
        AttentionRequest,
        EagerBackend,
        Flash2Backend,
        Flash4Backend,
        FlexBackend,
        SdpaBackend,
        VarlenBackend,
        choose_attention_backend,
        chosen_attention,
        default_attention_backends,
        documents_of_lengths,
    )
    from d9d_modules.attention_sinks import AttentionSinks, HeadParallel
    from d9d_modules.checkpointing import (
        CheckpointPolicy,
        Operator,
        checkpoint_activations,
        checkpoint_layers,
        default_saved_operators,
    )
    from d9d_modules.chunked_cross_entropy import linear_cross_entropy
    from d9d_modules.compiling import compile_layers
    from d9d_modules.convolution import CausalConvolution, causal_convolution
    from d9d_modules.cross_entropy import PLAIN_CROSS_ENTROPY, CrossEntropy
    from d9d_modules.decay_gate import DecayGate, DecayParallel, LogSigmoidDecayGate
    from d9d_modules.decoder import DecoderLayer, HasExperts, Hidden, HiddenAndLosses
    from d9d_modules.delta_rule import DeltaRuleBackend, gated_delta_rule
    from d9d_modules.embedding import SplitTokenEmbedding, TokenEmbedding
    from d9d_modules.float8 import Float8, Float8Recipe, convert_to_float8
    from d9d_modules.gated_delta_net import GatedDeltaNet
    from d9d_modules.gated_norm import GatedRMSNorm
    from d9d_modules.generation import Rollout, generate
    from d9d_modules.latent_attention import MultiHeadLatentAttention
    from d9d_modules.layer_means import LayerMeans
    from d9d_modules.linear import Linear
    from d9d_modules.lm_head import IGNORED_LABEL, LanguageModelHead, LossBackend, Scores, language_model_head
    from d9d_modules.mixer_cache import MixerCache, PositionCache, RecurrentCache, SupportsCache
    from d9d_modules.models.decoder_heads import (
        DecoderForCausalLM,
        DecoderForClassification,
        DecoderForEmbedding,
        DecoderWithHeads,
        Head,
        HeadedDecoder,
        HeadFactory,
        decoder_lm_head,
    )
    from d9d_modules.models.decoder_hugging_face import (
        FeedForwardMapper,
        decoder_backbone_from_hugging_face,
        decoder_classifier_from_hugging_face,
        decoder_from_hugging_face,
    )
    from d9d_modules.models.decoder_model import WHOLE_MODEL, DecoderModel, Received
    from d9d_modules.models.decoder_mtp import (
        DEEPSEEK_MTP,
        QWEN_MTP,
        DecoderWithMtp,
        MtpLayer,
        MtpNames,
        mtp_from_hugging_face,
        mtp_targets,
    )
    from d9d_modules.models.decoder_parallelize import ParallelizeExperts, parallelize_decoder
    from d9d_modules.models.decoder_params import (
        AuxiliaryLosses,
        DecoderParams,
        MixerKind,
        Rope,
        RopeScaling,
        check_layers,
        check_positive,
        swiglu_from_hugging_face,
    )
    from d9d_modules.models.decoder_tensor_plan import HasTensorPlan, RowParts, WholeRows, decoder_tensor_plan
    from d9d_modules.models.gemma3 import GEMMA3, Gemma3Params
    from d9d_modules.models.glm4 import GLM4, Glm4Params
    from d9d_modules.models.grouped_query import AttentionForm, GroupedQueryParams
    from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, layer_types_of, require_value
    from d9d_modules.models.hugging_face_family import (
        DECODER_ENTRIES,
        FIXED_ENTRIES,
        GROUPED_QUERY_ENTRIES,
        Entry,
        HuggingFaceFamily,
    )
    from d9d_modules.models.hugging_face_quantization import quantization_from_hugging_face
    from d9d_modules.models.hybrid import (
        HYBRID_FIXED,
        HYBRID_OWN,
        HybridParams,
        hybrid_entries,
        read_full_layers,
        written_full_layers,
    )
    from d9d_modules.models.llama3 import LLAMA3, Llama3ForCausalLM, Llama3Params
    from d9d_modules.models.local_global import LocalGlobalParams
    from d9d_modules.models.mistral import MISTRAL, MistralParams
    from d9d_modules.models.modernbert import MODERNBERT, ModernBertParams, modernbert_from_hugging_face
    from d9d_modules.models.pretrained import (
        FAMILY_ENTRY_POINTS,
        PretrainedDecoder,
        PretrainedHead,
        from_pretrained_config,
        known_families,
    )
    from d9d_modules.models.qwen2 import QWEN2, Qwen2Params
    from d9d_modules.models.qwen3 import QWEN3, Qwen3ForCausalLM, Qwen3Params
    from d9d_modules.models.qwen3_5 import QWEN3_5, Qwen35Params, text_config
    from d9d_modules.norm import LayerNorm, Norm, RMSNorm, add_rms_norm, rms_norm
    from d9d_modules.pooling import Pooling, pool
    from d9d_modules.rope import RotaryLayout, RotaryTables, apply_rotary, rotary_tables
    from d9d_modules.rope_scaling import (
        DynamicNtkScaling,
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        NtkScaling,
        RotaryScaling,
        YarnScaling,
    )
    from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead, HeadTransform
    from d9d_modules.swiglu import GeGLU, GeluForm, SwiGLU, silu_mul
    from d9d_modules.vocabulary_scores import TokenScores, token_scores
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ATTENTION_VARIABLE",
    "DECODER_ENTRIES",
    "DEEPSEEK_MTP",
    "FAMILY_ENTRY_POINTS",
    "FIXED_ENTRIES",
    "GEMMA3",
    "GLM4",
    "GROUPED_QUERY_ENTRIES",
    "HYBRID_FIXED",
    "HYBRID_OWN",
    "IGNORED_LABEL",
    "LLAMA3",
    "MISTRAL",
    "MODERNBERT",
    "PLAIN_CROSS_ENTROPY",
    "QWEN2",
    "QWEN3",
    "QWEN3_5",
    "QWEN_MTP",
    "WHOLE_MODEL",
    "AttentionBackend",
    "AttentionBackendName",
    "AttentionFeatures",
    "AttentionForm",
    "AttentionOptions",
    "AttentionRequest",
    "AttentionSinks",
    "AuxiliaryLosses",
    "CausalConvolution",
    "CheckpointPolicy",
    "ClassificationHead",
    "CrossEntropy",
    "DecayGate",
    "DecayParallel",
    "DecoderForCausalLM",
    "DecoderForClassification",
    "DecoderForEmbedding",
    "DecoderLayer",
    "DecoderModel",
    "DecoderParams",
    "DecoderWithHeads",
    "DecoderWithMtp",
    "DeltaRuleBackend",
    "DynamicNtkScaling",
    "EagerBackend",
    "EmbeddingHead",
    "Entry",
    "FeedForwardMapper",
    "Flash2Backend",
    "Flash4Backend",
    "FlexBackend",
    "Float8",
    "Float8Recipe",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "GeGLU",
    "GeluForm",
    "Gemma3Params",
    "Glm4Params",
    "GroupedQueryAttention",
    "GroupedQueryParams",
    "HasExperts",
    "HasTensorPlan",
    "Head",
    "HeadFactory",
    "HeadParallel",
    "HeadTransform",
    "HeadedDecoder",
    "Hidden",
    "HiddenAndLosses",
    "HuggingFaceConfig",
    "HuggingFaceFamily",
    "HybridParams",
    "LanguageModelHead",
    "LayerMeans",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3ForCausalLM",
    "Llama3Params",
    "Llama3Scaling",
    "LocalGlobalParams",
    "LogSigmoidDecayGate",
    "LongRopeScaling",
    "LossBackend",
    "MistralParams",
    "MixerCache",
    "MixerKind",
    "ModernBertParams",
    "MtpLayer",
    "MtpNames",
    "MultiHeadLatentAttention",
    "Norm",
    "NtkScaling",
    "Operator",
    "ParallelizeExperts",
    "Pooling",
    "PositionCache",
    "PretrainedDecoder",
    "PretrainedHead",
    "Qwen2Params",
    "Qwen3ForCausalLM",
    "Qwen3Params",
    "Qwen35Params",
    "RMSNorm",
    "Received",
    "RecurrentCache",
    "Rollout",
    "Rope",
    "RopeScaling",
    "RotaryLayout",
    "RotaryScaling",
    "RotaryTables",
    "RowParts",
    "Scores",
    "SdpaBackend",
    "SplitTokenEmbedding",
    "SupportsCache",
    "SwiGLU",
    "TokenEmbedding",
    "TokenScores",
    "VarlenBackend",
    "WholeRows",
    "YarnScaling",
    "add_rms_norm",
    "apply_rotary",
    "causal_convolution",
    "check_layers",
    "check_positive",
    "checkpoint_activations",
    "checkpoint_layers",
    "choose_attention_backend",
    "chosen_attention",
    "compile_layers",
    "config_value",
    "convert_to_float8",
    "decoder_backbone_from_hugging_face",
    "decoder_classifier_from_hugging_face",
    "decoder_from_hugging_face",
    "decoder_lm_head",
    "decoder_tensor_plan",
    "default_attention_backends",
    "default_saved_operators",
    "documents_of_lengths",
    "from_pretrained_config",
    "gated_delta_rule",
    "generate",
    "hybrid_entries",
    "known_families",
    "language_model_head",
    "layer_types_of",
    "linear_cross_entropy",
    "modernbert_from_hugging_face",
    "mtp_from_hugging_face",
    "mtp_targets",
    "parallelize_decoder",
    "pool",
    "quantization_from_hugging_face",
    "read_full_layers",
    "require_value",
    "rms_norm",
    "rotary_tables",
    "silu_mul",
    "swiglu_from_hugging_face",
    "text_config",
    "token_scores",
    "written_full_layers",
]
