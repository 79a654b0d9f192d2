"""Small models of `transformers` of many kinds, with their inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DECODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LATENT = {
    **{name: value for name, value in _DECODER.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
_T5 = {"vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """Model of `transformers`.

    Attributes:
        model_class: Name of its class in `transformers`.
        config: Values of its configuration.
        inputs: Inputs of its forward.
        rounds_to_float32: True if norms, a router or a scan round values to float32 that layouts sum in another order.
    """

    model_class: str
    config: dict[str, Any]
    inputs: tuple[str, ...] = ("input_ids",)
    rounds_to_float32: bool = False

    def build(self) -> Any:
        """Build the model with values that differ from its initialization."""
        import transformers

        torch.manual_seed(1)
        model_class = getattr(transformers, self.model_class)
        model = model_class(model_class.config_class(**self.config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def save(self, folder: Path) -> Path:
        """Write the model with `save_pretrained`."""
        self.build().save_pretrained(folder)
        return folder

    def samples(self, num_samples: int) -> list[dict[str, torch.Tensor]]:
        """Return inputs of the model, each without a batch dim."""
        generator = torch.Generator().manual_seed(2)
        return [{name: _INPUTS[name](generator) for name in self.inputs} for _ in range(num_samples)]


def _ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, 48, (7,), generator=generator)


_INPUTS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "pixel_values": lambda generator: torch.randn(3, 8, 8, generator=generator),
    "input_features": lambda generator: torch.randn(4, 16, generator=generator),
    "input_values": lambda generator: torch.randn(400, generator=generator),
}

CASES = {
    "llama": Case("LlamaForCausalLM", {**_DECODER}),
    "llama tied": Case("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen2": Case("Qwen2ForCausalLM", {**_DECODER}),
    "qwen3": Case("Qwen3ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "mistral": Case("MistralForCausalLM", {**_DECODER}),
    "gemma2": Case("Gemma2ForCausalLM", {**_DECODER, "query_pre_attn_scalar": 4}, rounds_to_float32=True),
    "gemma3": Case("Gemma3ForCausalLM", {**_DECODER, "query_pre_attn_scalar": 4}, rounds_to_float32=True),
    "phi3": Case("Phi3ForCausalLM", {**_DECODER}),
    "olmo2": Case("Olmo2ForCausalLM", {**_DECODER}),
    "qwen3 moe": Case("Qwen3MoeForCausalLM", {**_DECODER, **_EXPERTS}),
    "mixtral": Case("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "deepseek v3": Case("DeepseekV3ForCausalLM", {**_LATENT}, rounds_to_float32=True),
    "glm4 moe lite": Case("Glm4MoeLiteForCausalLM", {**_LATENT}, rounds_to_float32=True),
    "gpt2": Case(
        "GPT2LMHeadModel",
        {
            "vocab_size": 48,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt neox": Case("GPTNeoXForCausalLM", {**_ENCODER, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bert": Case("BertForMaskedLM", {**_ENCODER}),
    "roberta": Case("RobertaForSequenceClassification", {**_ENCODER, "num_labels": 3}),
    "distilbert": Case(
        "DistilBertForMaskedLM",
        {
            "vocab_size": 48,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "albert": Case("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 8}),
    "electra": Case("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 8}),
    "t5": Case("T5ForConditionalGeneration", {**_T5}, ("input_ids", "decoder_input_ids")),
    "bart": Case(
        "BartForConditionalGeneration",
        {
            "vocab_size": 48,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 32,
            "dropout": 0.0,
        },
        ("input_ids", "decoder_input_ids"),
    ),
    "vit": Case("ViTForImageClassification", {**_ENCODER, **_IMAGES, "num_labels": 3}, ("pixel_values",)),
    "clip vision": Case("CLIPVisionModel", {**_ENCODER, **_IMAGES}, ("pixel_values",)),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 48,
            "num_mel_bins": 4,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.0,
        },
        ("input_features", "decoder_input_ids"),
    ),
    "wav2vec2": Case(
        "Wav2Vec2ForCTC",
        {
            **_ENCODER,
            "conv_dim": (8, 8),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        ("input_values",),
    ),
    "mamba": Case(
        "MambaForCausalLM",
        {"vocab_size": 48, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        rounds_to_float32=True,
    ),
}
"""All kinds, by name."""
