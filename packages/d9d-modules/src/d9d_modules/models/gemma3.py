"""Gemma 3, text (arXiv:2503.19786): local and global layers, sandwich norms, QK norm, GeGLU; and EmbeddingGemma.

EmbeddingGemma (arXiv:2509.20354) is the same decoder with bidirectional attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import nn

from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.grouped_query import AttentionForm
from d9d_modules.models.hugging_face_config import (
    HuggingFaceConfig,
    config_value,
    layers_of_kind,
    require_equal_tying,
    require_value,
    text_entries,
    written_layer_types,
)
from d9d_modules.models.local_global import LocalGlobalParams, read_global_rope, read_local_theta, written_ropes
from d9d_modules.pooling import Pooling
from d9d_modules.swiglu import GeGLU
from d9d_state import JsonValue


@final
@dataclass(frozen=True, kw_only=True)
class Gemma3Params(LocalGlobalParams):
    """Hyperparameters of a Gemma 3 text model; see `LocalGlobalParams`.

    Attributes:
        query_pre_attn_scalar: The softmax scale is 1 / sqrt of this number.
        final_softcap: Soft-cap of the logits; None disables it.
        is_causal: If False, all positions attend to each other (EmbeddingGemma). The window then has
            `sliding_window - 1` positions on each side.
    """

    zero_centered_norms: ClassVar[bool] = True
    sandwich_norms: ClassVar[bool] = True
    hugging_face_norms: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "feed_forward_norm",
        "post_feedforward_layernorm": "feed_forward_output_norm",
    }

    tie_word_embeddings: bool = True
    rope_theta: float = 1_000_000.0
    query_pre_attn_scalar: int = 256
    final_softcap: float | None = None
    is_causal: bool = True
    max_position_embeddings: int = 131_072

    @property
    def attention_form(self) -> AttentionForm:
        """See `GroupedQueryParams`."""
        return AttentionForm(qk_norm=True, scale=self.query_pre_attn_scalar**-0.5, is_causal=self.is_causal)

    @property
    def pooling(self) -> Pooling:
        """See `DecoderParams`; without causality, the pooling of EmbeddingGemma."""
        return "last" if self.is_causal else "mean"

    @property
    def embedding_scale(self) -> float:
        """See `DecoderParams`."""
        return self.hidden_size**0.5

    def lm_head(self) -> LanguageModelHead:
        """See `DecoderParams`."""
        std = self.initializer_range
        return LanguageModelHead(self.hidden_size, self.vocab_size, softcap=self.final_softcap, init_std=std)

    def feed_forward(self, index: int) -> nn.Module:
        """See `DecoderParams`."""
        return GeGLU(self.hidden_size, self.intermediate_size, init_std=self.initializer_range)


def _text(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the entries of the language model, which multimodal configurations contain as `text_config`."""
    text = text_entries(config)
    require_equal_tying(config, default=True)
    if "text_config" in config:  # the multimodal class of transformers does not read them
        require_value(text, "final_logit_softcapping", None, where="text_config of config.json")
        if text.get("use_bidirectional_attention") is not None:
            require_value(text, "use_bidirectional_attention", supported=False, where="text_config of config.json")
    return text


def _read_own(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    step = config_value(config, "sliding_window_pattern", int, default=6)
    layers = layers_of_kind(
        config, values["num_layers"], "sliding_attention", default=lambda index: (index + 1) % step > 0
    )
    key = "use_bidirectional_attention"
    read: dict[str, Any] = {"is_causal": config.get(key) is None or not config_value(config, key, bool)}
    if layers:
        window = config_value(config, "sliding_window", int)
        read |= {"sliding_window": window if read["is_causal"] else window // 2 + 1, "sliding_layers": layers}
    read["sliding_rope_theta"] = read_local_theta(config, key="rope_local_base_freq")
    if config.get("final_logit_softcapping") is not None:
        read["final_softcap"] = config_value(config, "final_logit_softcapping", float)
    return read


def _written_own(params: Gemma3Params) -> Mapping[str, JsonValue]:
    # transformers requires a window even if no layer uses it.
    window = params.max_position_embeddings if params.sliding_window is None else params.sliding_window
    return {
        "layer_types": written_layer_types(params),
        "sliding_window": window if params.is_causal else 2 * (window - 1),
        "use_bidirectional_attention": not params.is_causal,
        "rope_local_base_freq": params.sliding_rope_theta,
        "final_logit_softcapping": params.final_softcap,
    }


GEMMA3 = hf.HuggingFaceFamily(
    params=Gemma3Params,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    entries=(
        *hf.with_defaults(
            hf.GROUPED_QUERY_ENTRIES,
            vocab_size=262_208,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
            max_position_embeddings=131_072,
        ),
        hf.Entry("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
    ),
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
    },
    own=(
        "final_logit_softcapping",
        "layer_types",
        "rope_local_base_freq",
        "sliding_window",
        "sliding_window_pattern",
        "use_bidirectional_attention",
    ),
    nested_type="gemma3",
    prepare=_text,
    read_rope=partial(read_global_rope, key="rope_theta", default=1_000_000.0),
    write_rope=written_ropes,
    read_own=_read_own,
    write_own=_written_own,
    irrelevant={"_sliding_window_pattern": "layer_types, which the same versions write, has precedence"},
    unused=("*vision_tower.*", "*multi_modal_projector.*"),
)
"""Checkpoints of Gemma 3, text, and of EmbeddingGemma."""
