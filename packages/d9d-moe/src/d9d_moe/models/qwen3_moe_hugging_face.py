"""Qwen3-MoE in the Hugging Face layout: import and export of tensors and `config.json`."""

from collections.abc import Mapping
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
from d9d_modules.models.decoder_hugging_face import DECODER_ENTRIES
from d9d_modules.models.hugging_face_config import config_keys_in_errors, require_known_keys
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT
from d9d_modules.models.qwen3_hugging_face import sliding_window_of
from d9d_moe.models.experts_hugging_face import (
    ExpertsLayout,
    experts_from_hugging_face,
    num_experts_key,
    router_losses_state,
)
from d9d_moe.models.qwen3_moe import Qwen3MoeParams
from d9d_state import JsonValue, StateMapper, parallel, rename

QWEN3_MOE_ENTRIES = (
    *DECODER_ENTRIES,
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
    "sliding_window",
    "use_sliding_window",
)
"""Entries that `qwen3_moe_params_from_hugging_face` reads."""

QWEN3_MOE_IRRELEVANT: Mapping[str, str] = {
    **IRRELEVANT,
    "max_window_layers": "transformers applies the window to all layers of this family, or to none",
}
"""Entries that do not affect the model, each with the reason."""

_KEYS = {"top_k": "num_experts_per_tok", "expert_intermediate_size": "moe_intermediate_size"}


def qwen3_moe_from_hugging_face(params: Qwen3MoeParams, *, layout: ExpertsLayout = "per_expert") -> StateMapper:
    """Return the mapper that loads a Hugging Face checkpoint into `Qwen3MoeForCausalLM`; its `inverse()` exports.

    Args:
        params: Parameters of the model.
        layout: Layout of the expert weights in the checkpoint.
    """
    experts = experts_from_hugging_face(params.num_experts, params.expert_intermediate_size, layout=layout)
    sparse = parallel(rename("gate.weight", "router.weight"), experts, *router_losses_state(params.router_losses))

    def feed_forward(index: int) -> StateMapper:
        return swiglu_from_hugging_face() if index in params.dense_layers else sparse

    return qwen3_from_hugging_face(params.decoder, feed_forward=feed_forward)


def qwen3_moe_hugging_face_config(params: Qwen3MoeParams) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Qwen3MoeForCausalLM`, for `transformers` and inference engines.

    Raises:
        UserError: If a `config.json` cannot express the RoPE scaling, or only a part of the layers has a sliding
            window.
    """
    dense = qwen3_hugging_face_config(replace(params.decoder, sliding_window=None, sliding_layers=()))
    del dense["layer_types"]
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": params.num_experts,
        "num_local_experts": params.num_experts,
        "num_experts_per_tok": params.top_k,
        "moe_intermediate_size": params.expert_intermediate_size,
        "norm_topk_prob": params.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(params.dense_layers),
        **_sliding_entries(params.decoder),
    }


def qwen3_moe_params_from_hugging_face(config: HuggingFaceConfig) -> Qwen3MoeParams:
    """Return the parameters of a Qwen3-MoE model from its parsed `config.json`.

    Raises:
        UserError: If the configuration is of another family, lacks a required entry, or has an unsupported value.
    """
    require_value(config, "model_type", "qwen3_moe", required=True)
    require_known_keys(config, used=QWEN3_MOE_ENTRIES, irrelevant=QWEN3_MOE_IRRELEVANT)
    _refuse_router_loss(config)
    decoder = decoder_params_from_hugging_face(config)
    if config_value(config, "use_sliding_window", bool, default=False):
        window = sliding_window_of(config)
        decoder = replace(decoder, sliding_window=window, sliding_layers=tuple(range(decoder.num_layers)))
    experts_key = num_experts_key(config, "num_experts")
    with config_keys_in_errors({**_KEYS, "num_experts": experts_key}):
        return Qwen3MoeParams(
            decoder=decoder,
            num_experts=config_value(config, experts_key, int),
            top_k=config_value(config, "num_experts_per_tok", int),
            expert_intermediate_size=config_value(config, "moe_intermediate_size", int),
            renormalize=config_value(config, "norm_topk_prob", bool, default=False),
            dense_layers=_dense_layers(config, decoder.num_layers),
        )


def _sliding_entries(decoder: Qwen3Params) -> dict[str, JsonValue]:
    """Return the entries of the sliding window.

    Raises:
        UserError: If only a part of the layers has a window, which this family's `config.json` cannot express.
    """
    if decoder.sliding_window is None:
        return {}
    if len(set(decoder.sliding_layers)) < decoder.num_layers:
        raise UserError(
            f"sliding_layers = {decoder.sliding_layers} of {decoder.num_layers} layers; a config.json of Qwen3-MoE has "
            "one window for all layers: expected all layers, or none."
        )
    return {"use_sliding_window": True, "sliding_window": decoder.sliding_window, "max_window_layers": 0}


def _dense_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers without experts: those in `mlp_only_layers` or skipped by the sparse step."""
    named = config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(index) is int and index in range(num_layers) for index in named):
        raise UserError(
            f"config.json has mlp_only_layers = {named!r}; expected a list of layer indices from 0 to {num_layers - 1}."
        )
    step = config_value(config, "decoder_sparse_step", int, default=1)
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def _refuse_router_loss(config: HuggingFaceConfig) -> None:
    """Refuse the balance loss that `transformers` adds to the loss of the model.

    Raises:
        UserError: If `output_router_logits` is true.
    """
    if config_value(config, "output_router_logits", bool, default=False):
        factor = config_value(config, "router_aux_loss_coef", float, default=0.001, minimum=0.0)
        raise UserError(
            f"config.json has output_router_logits = True, with which transformers adds a balance loss of "
            f"router_aux_loss_coef = {factor}; expected False. Set it to False, and configure the loss of the model: "
            f'replace(params, router_losses=RouterLosses(balance={factor}, definition="transformers", scope="batch")).'
        )
