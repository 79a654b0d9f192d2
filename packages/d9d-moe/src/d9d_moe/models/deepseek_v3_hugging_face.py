"""DeepSeek-V3 in the Hugging Face layout: import and export of tensors and `config.json`."""

from collections.abc import Mapping

from d9d_dist.errors import UserError
from d9d_modules import HuggingFaceConfig, Qwen3Params, config_value, require_value, swiglu_from_hugging_face
from d9d_modules.models.decoder_hugging_face import DECODER_ENTRIES, DECODER_KEYS, require_plain_decoder
from d9d_modules.models.hugging_face_config import config_keys_in_errors, require_known_keys
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face, rope_to_hugging_face
from d9d_moe.models.deepseek_v3 import DeepseekV3Params
from d9d_moe.models.experts_hugging_face import (
    ExpertsLayout,
    experts_from_hugging_face,
    num_experts_key,
    router_losses_state,
)
from d9d_state import JsonValue, StateMapper, parallel, rename, repeat, scope

DEEPSEEK_V3_ENTRIES = (
    *DECODER_ENTRIES,
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
    "v_head_dim",
)
"""Entries that `deepseek_v3_params_from_hugging_face` reads."""

DEEPSEEK_V3_IRRELEVANT: Mapping[str, str] = {
    **IRRELEVANT,
    "aux_loss_alpha": "transformers has no balance loss for this family; set router_losses of the model for one",
    "ep_size": "the mesh of the job sets the expert-parallel degree",
    "num_mtp_layers": "layers for multi-token prediction are not loaded",
    "num_nextn_predict_layers": "layers for multi-token prediction are not loaded",
    "output_router_logits": "affects only the output: transformers has no balance loss for this family",
    "seq_aux": "transformers has no balance loss for this family; set router_losses of the model for one",
}
"""Entries that do not affect the model, each with the reason."""

_KEYS = {
    **DECODER_KEYS,
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "head_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "num_dense_layers": "first_k_dense_replace",
    "top_k": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "num_groups": "n_group",
    "top_groups": "topk_group",
    "routed_scale": "routed_scaling_factor",
}


def deepseek_v3_from_hugging_face(params: DeepseekV3Params, *, layout: ExpertsLayout = "per_expert") -> StateMapper:
    """Return the mapper that loads a Hugging Face checkpoint into `DeepseekV3ForCausalLM`; its `inverse()` exports.

    The layer for multi-token prediction, which follows the last decoder layer in a checkpoint, is not mapped.

    Args:
        params: Parameters of the model.
        layout: Layout of the expert weights in the checkpoint.
    """
    dense, sparse = range(params.num_dense_layers), range(params.num_dense_layers, params.num_layers)
    feed_forwards = [
        repeat(scope("model.layers.{i}.mlp.", "backbone.layers.{i}.feed_forward.", mapper), i=indices)
        for indices, mapper in ((dense, swiglu_from_hugging_face()), (sparse, _sparse(params, layout)))
        if indices
    ]
    return parallel(
        rename("model.embed_tokens.weight", "backbone.embedding.weight"),
        repeat(
            scope("model.layers.{i}.", "backbone.layers.{i}.", _attention_and_norms(params)), i=range(params.num_layers)
        ),
        *feed_forwards,
        rename("model.norm.weight", "backbone.norm.weight"),
        *([] if params.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
    )


def deepseek_v3_hugging_face_config(params: DeepseekV3Params) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `DeepseekV3ForCausalLM`, for `transformers` and inference engines.

    Raises:
        UserError: If a `config.json` cannot express the RoPE scaling, or the model has no shared experts.
    """
    if params.num_shared_experts == 0:
        raise UserError(
            "num_shared_experts = 0; a config.json of DeepSeek-V3 needs 1 or more. Use num_shared_experts = 1."
        )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": params.vocab_size,
        "hidden_size": params.hidden_size,
        "num_hidden_layers": params.num_layers,
        "num_attention_heads": params.num_heads,
        "num_key_value_heads": params.num_heads,
        "kv_lora_rank": params.kv_rank,
        "q_lora_rank": params.q_rank,
        "qk_nope_head_dim": params.head_dim,
        "qk_rope_head_dim": params.rotary_dim,
        "qk_head_dim": params.head_dim + params.rotary_dim,
        "head_dim": params.rotary_dim,
        "v_head_dim": params.value_dim,
        "rope_interleave": params.rotary_layout == "interleaved",
        **rope_to_hugging_face(_positions(params)),
        "intermediate_size": params.intermediate_size,
        "first_k_dense_replace": params.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": params.num_experts,
        "num_local_experts": params.num_experts,
        "n_shared_experts": params.num_shared_experts,
        "num_experts_per_tok": params.top_k,
        "moe_intermediate_size": params.expert_intermediate_size,
        "n_group": params.num_groups,
        "topk_group": params.top_groups,
        "norm_topk_prob": params.renormalize,
        "routed_scaling_factor": params.routed_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": params.rms_norm_eps,
        "tie_word_embeddings": params.tie_word_embeddings,
        "initializer_range": params.initializer_range,
        "max_position_embeddings": params.max_position_embeddings,
    }


def deepseek_v3_params_from_hugging_face(config: HuggingFaceConfig) -> DeepseekV3Params:
    """Return the parameters of a DeepSeek-V3 model from its parsed `config.json`.

    Raises:
        UserError: If the configuration is of another family, lacks a required entry, or has an unsupported value.
    """
    require_value(config, "model_type", "deepseek_v3", required=True)
    require_known_keys(config, used=DEEPSEEK_V3_ENTRIES, irrelevant=DEEPSEEK_V3_IRRELEVANT)
    require_plain_decoder(config)
    require_value(config, "scoring_func", "sigmoid")
    require_value(config, "topk_method", "noaux_tc")
    require_value(config, "moe_layer_freq", 1)
    for key in ("n_group", "topk_group"):
        if config.get(key, 1) is None:
            raise UserError(
                f"config.json has {key} = null, which transformers does not support either; expected a number. Set "
                "n_group and topk_group to 1 to route without groups."
            )
    theta, scaling = rope_from_hugging_face(config)
    is_interleaved = config_value(config, "rope_interleave", bool, default=True)
    _require_implied_sizes(config)
    experts_key = num_experts_key(config, "n_routed_experts")
    with config_keys_in_errors({**_KEYS, "num_experts": experts_key}):
        return DeepseekV3Params(
            vocab_size=config_value(config, "vocab_size", int),
            hidden_size=config_value(config, "hidden_size", int),
            num_layers=config_value(config, "num_hidden_layers", int),
            num_heads=config_value(config, "num_attention_heads", int),
            kv_rank=config_value(config, "kv_lora_rank", int),
            q_rank=None if config.get("q_lora_rank") is None else config_value(config, "q_lora_rank", int),
            head_dim=config_value(config, "qk_nope_head_dim", int),
            rotary_dim=config_value(config, "qk_rope_head_dim", int),
            value_dim=config_value(config, "v_head_dim", int),
            intermediate_size=config_value(config, "intermediate_size", int),
            num_dense_layers=config_value(config, "first_k_dense_replace", int, minimum=0),
            num_experts=config_value(config, experts_key, int),
            top_k=config_value(config, "num_experts_per_tok", int),
            expert_intermediate_size=config_value(config, "moe_intermediate_size", int),
            num_shared_experts=config_value(config, "n_shared_experts", int, default=1),
            num_groups=config_value(config, "n_group", int, default=8),
            top_groups=config_value(config, "topk_group", int, default=4),
            renormalize=config_value(config, "norm_topk_prob", bool, default=True),
            routed_scale=config_value(config, "routed_scaling_factor", float, default=2.5),
            rotary_layout="interleaved" if is_interleaved else "half",
            tie_word_embeddings=config_value(config, "tie_word_embeddings", bool, default=False),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=config_value(config, "rms_norm_eps", float, default=1e-6),
            initializer_range=config_value(config, "initializer_range", float, default=0.02),
            max_position_embeddings=config_value(config, "max_position_embeddings", int, default=4096),
        )


def _require_implied_sizes(config: HuggingFaceConfig) -> None:
    """Refuse redundant sizes that contradict the sizes from which they follow, and a missing `q_lora_rank`.

    Raises:
        UserError: If an entry differs from its implied value, or `q_lora_rank` is missing.
    """
    rotary_dim, nope_dim = (config_value(config, f"qk_{part}_head_dim", int) for part in ("rope", "nope"))
    for key, implied, source in (
        ("head_dim", rotary_dim, "qk_rope_head_dim"),
        ("qk_head_dim", nope_dim + rotary_dim, "qk_nope_head_dim + qk_rope_head_dim"),
        ("num_key_value_heads", config_value(config, "num_attention_heads", int), "num_attention_heads"),
    ):
        value = config.get(key)
        if value is not None and (value != implied or isinstance(value, bool)):
            raise UserError(
                f"config.json has {key} = {value!r}; expected {source} = {implied}, or no entry {key!r}. Correct or "
                "remove it."
            )
    if "q_lora_rank" not in config:
        raise UserError(
            "config.json has no 'q_lora_rank'; expected an integer, or null for queries without a latent vector."
        )


def _positions(params: DeepseekV3Params) -> Qwen3Params:
    """Return decoder parameters with the same RoPE settings, which all families export in the same way."""
    return Qwen3Params(
        vocab_size=params.vocab_size,
        hidden_size=params.hidden_size,
        num_layers=params.num_layers,
        num_heads=params.num_heads,
        num_kv_heads=params.num_heads,
        head_dim=params.rotary_dim,
        intermediate_size=params.intermediate_size,
        rope_theta=params.rope_theta,
        rope_scaling=params.rope_scaling,
        rope_length=params.rope_length,
        max_position_embeddings=params.max_position_embeddings,
    )


def _attention_and_norms(params: DeepseekV3Params) -> StateMapper:
    queries = (
        {"q_proj": "q_proj"}
        if params.q_rank is None
        else {"q_a_proj": "q_down_proj", "q_a_layernorm": "q_norm", "q_b_proj": "q_up_proj"}
    )
    names = {
        **queries,
        "kv_a_proj_with_mqa": "kv_down_proj",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up_proj",
        "o_proj": "o_proj",
    }
    attention = parallel(*(rename(f"{hf_name}.weight", f"{name}.weight") for hf_name, name in names.items()))
    return parallel(
        rename("input_layernorm.weight", "attention_norm.weight"),
        rename("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        scope("self_attn.", "attention.", attention),
    )


def _sparse(params: DeepseekV3Params, layout: ExpertsLayout) -> StateMapper:
    shared = [scope("shared_experts.", "shared.experts.", swiglu_from_hugging_face())]
    return parallel(
        rename("gate.weight", "router.weight"),
        rename("gate.e_score_correction_bias", "router.selection_bias"),
        experts_from_hugging_face(params.num_experts, params.expert_intermediate_size, layout=layout),
        *(shared if params.num_shared_experts else []),
        *router_losses_state(params.router_losses),
    )
