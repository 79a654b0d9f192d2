"""Qwen3-MoE in the Hugging Face layout: names of tensors and `config.json`, both ways."""

from dataclasses import replace

from d9d_dist.errors import UserError
from d9d_modules import (
    HuggingFaceConfig,
    Qwen3Params,
    config_value,
    decoder_params_from_hugging_face,
    qwen3_from_hugging_face,
    qwen3_hugging_face_config,
    require_value,
    swiglu_from_hugging_face,
)
from d9d_moe.models.experts_hugging_face import ExpertsLayout, experts_from_hugging_face, router_losses_state
from d9d_moe.models.qwen3_moe import Qwen3MoeParams
from d9d_state import JsonValue, StateMapper, parallel, rename


def qwen3_moe_from_hugging_face(params: Qwen3MoeParams, *, layout: ExpertsLayout = "per_expert") -> StateMapper:
    """Mapper from a Hugging Face checkpoint on disk to `Qwen3MoeForCausalLM`; its `inverse()` exports.

    Args:
        params: Sizes of the model.
        layout: How experts are stored.
    """
    experts = experts_from_hugging_face(params.num_experts, params.expert_intermediate_size, layout=layout)
    sparse = parallel(rename("gate.weight", "router.weight"), experts, *router_losses_state(params.router_losses))

    def feed_forward(index: int) -> StateMapper:
        return swiglu_from_hugging_face() if index in params.dense_layers else sparse

    return qwen3_from_hugging_face(params.decoder, feed_forward=feed_forward)


def qwen3_moe_hugging_face_config(params: Qwen3MoeParams) -> dict[str, JsonValue]:
    """The `config.json` with which `transformers` and inference engines load an exported `Qwen3MoeForCausalLM`.

    Raises:
        UserError: If the layout has no place for the scaling of the positions, or for windows of some layers only.
    """
    return qwen3_hugging_face_config(replace(params.decoder, sliding_window=None, sliding_layers=())) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": params.num_experts,
        "num_experts_per_tok": params.top_k,
        "moe_intermediate_size": params.expert_intermediate_size,
        "norm_topk_prob": params.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(params.dense_layers),
        **_sliding_entries(params.decoder),
    }


def qwen3_moe_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3MoeParams:
    """Sizes from the parsed `config.json` of a Qwen3-MoE checkpoint.

    Raises:
        UserError: If it describes another family, lacks a size, or asks for what is not implemented.
    """
    require_value(config, "model_type", "qwen3_moe", required=True)
    decoder = decoder_params_from_hugging_face(config)
    if config_value(config, "use_sliding_window", bool, default=False):
        window = config_value(config, "sliding_window", int)
        decoder = replace(decoder, sliding_window=window, sliding_layers=tuple(range(decoder.num_layers)))
    # The library that wrote the file names the experts so since its fifth version.
    experts_key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return Qwen3MoeParams(
        decoder=decoder,
        num_experts=config_value(config, experts_key, int),
        top_k=config_value(config, "num_experts_per_tok", int),
        expert_intermediate_size=config_value(config, "moe_intermediate_size", int),
        renormalize=config_value(config, "norm_topk_prob", bool, default=False),
        dense_layers=_dense_layers(config, decoder.num_layers),
    )


def _sliding_entries(decoder: Qwen3Params) -> dict[str, JsonValue]:
    """The layout of this family has no types of layers: all of them have the window, or none."""
    if decoder.sliding_window is None:
        return {}
    if len(set(decoder.sliding_layers)) < decoder.num_layers:
        raise UserError(
            f"sliding_layers = {decoder.sliding_layers} of {decoder.num_layers} layers; a config.json of Qwen3-MoE has "
            "one window for all layers: expected all of them, or none."
        )
    return {"use_sliding_window": True, "sliding_window": decoder.sliding_window, "max_window_layers": 0}


def _dense_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Layers named as dense, and those that the sparse step passes over."""
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise UserError(f"config.json has mlp_only_layers = {named!r}; expected a list of layer indices.")
    step = config_value(config, "decoder_sparse_step", int, default=1)
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)
