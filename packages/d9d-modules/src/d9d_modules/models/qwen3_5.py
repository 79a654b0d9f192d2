"""Qwen3.5, dense, without its vision tower: Gated DeltaNet layers, and gated attention in every fourth layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, require_equal_tying, text_entries
from d9d_modules.models.hybrid import (
    HYBRID_ENTRIES,
    HYBRID_FIXED,
    HYBRID_OWN,
    HybridParams,
    read_full_layers,
    written_full_layers,
)


@final
@dataclass(frozen=True, kw_only=True)
class Qwen35Params(HybridParams):
    """Hyperparameters of a dense Qwen3.5 model; see `HybridParams`.

    `decoder_from_hugging_face` maps its weights; released checkpoints need `prefix="model.language_model."`. `QWEN3_5`
    reads and writes its `config.json`.
    """


def text_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the entries of the language model, without the sections of a multimodal RoPE.

    Released configurations contain the language model as `text_config`. The positions of text are equal in all
    sections, so the sections have no effect.
    """
    text = text_entries(config)
    require_equal_tying(config, default=False)
    sections = ("mrope_section", "mrope_interleaved")
    ropes = {key: text[key] for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), Mapping)}
    return {
        **text,
        **{
            key: {name: value for name, value in rope.items() if name not in sections}
            for key, rope in ropes.items()
            if isinstance(rope, Mapping)
        },
    }


QWEN3_5 = hf.HuggingFaceFamily(
    params=Qwen35Params,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    entries=HYBRID_ENTRIES,
    fixed={**HYBRID_FIXED, "mlp_only_layers": []},
    own=HYBRID_OWN,
    nested_type="qwen3_5",
    prepare=text_config,
    read_own=read_full_layers,
    write_own=written_full_layers,
    irrelevant={
        "mamba_ssm_dtype": "the state of a linear layer is float32 or float64",
        "mtp_num_hidden_layers": "only DecoderWithMtp has layers for multi-token prediction",
        "mtp_use_dedicated_embeddings": "only DecoderWithMtp has layers for multi-token prediction",
    },
    unused=("mtp.*", "model.visual.*"),
    rotary_factor=0.25,
)
"""Checkpoints of dense Qwen3.5 models, with the language model's entries at the top level or as `text_config`."""
