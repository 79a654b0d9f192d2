"""Modules of other libraries in the zoo: transformers by its own mappings, timm, torchvision and diffusers.

Configurations are reduced by key names, in the same way for all architectures; a module that does not build or
run on such a configuration in a plain loop is not in the zoo.
"""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from zoo import BATCH, Batch, Entry, ids, normal

_MOST_PARAMETERS = 3_000_000

_DEPTHS = (
    *("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_hidden_layers"),
    *("num_decoder_layers", "num_encoder_layers", "depth"),
)

_WINDOWS = ("attention_window", "sliding_window", "attention_window_size", "local_attention")

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "embedding_size"), 32),
    **dict.fromkeys(("d_embed", "emb_dim", "encoder_hidden_size", "decoder_hidden_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(_DEPTHS, 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size", "global_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "mlp_dim", "dff", "hidden_dim_ffn"), 48),
    **dict.fromkeys(("vocab_size", "n_token", "text_vocab_size", "entity_vocab_size"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input",), 64),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_2d_position_embeddings"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel_size", "index_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("lru_width", "rnn_hidden_size", "attention_hidden_size"), 32),
    **dict.fromkeys(_WINDOWS, 8),
    **dict.fromkeys(("index_n_heads", "num_memory_blocks"), 2),
    **dict.fromkeys(("index_topk",), 64),
    "num_buckets": 4,
    "rotary_dim": 4,
    "axial_pos_shape": (4, 2),
    "axial_pos_embds_dim": (16, 16),
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "num_frames": 2,
    "tubelet_size": 1,
    "num_labels": 3,
    "layerdrop": 0.0,
    "use_cache": False,
    "apply_spec_augment": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "num_feat_extract_layers": 3,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_sizes": [16, 24, 32, 48],
    "embed_dims": [16, 24, 32, 48],
    "depths": [1, 1, 1, 1],
    "num_codevector_groups": 2,
}
"""Values by key, for the keys of an architecture's configuration."""


_FITTED: Mapping[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "num_expert_group": 1,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "qk_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "reformer": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_types": 4, "position_bias_num_buckets": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_expand": 2, "mamba_chunk_size": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2, "qk_head_dim": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "chunk_size": 4},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 64},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4, "num_heads": 4, "chunk_size": 4, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "attention_head_dim": 16, "chunk_size": 4},
}
"""Values of types, for keys whose meaning is that of one type."""

_NARROW = {"inkling2_text", "prophetnet", "xglm"}
"""Types whose plain loop needs float32: routers that cast, and masks of numbers that float32 does not have."""

_SPARSE: Mapping[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
}
"""Values of types that have no experts otherwise, for a comparison of experts."""

_SET_IF_NONE = {
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}


_NOT_SAMPLE_FIRST = {"musicgen", "musicgen_melody"}
"""Their tokens are (samples x codebooks, length), which no data loader can share out by samples."""


def transformers_names() -> dict[str, str]:
    """Return the training class of each architecture by model type, from the first mapping that contains it."""
    mappings = (
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_CLASSIFICATION",
        "SPEECH_SEQ_2_SEQ",
        "CTC",
        "AUDIO_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "SEMANTIC_SEGMENTATION",
        "DEPTH_ESTIMATION",
        "SEQUENCE_CLASSIFICATION",
    )
    names: dict[str, str] = {}
    for mapping in (*(f"MODEL_FOR_{name}_MAPPING_NAMES" for name in mappings), "MODEL_MAPPING_NAMES"):
        for model_type, name in getattr(modeling_auto, mapping).items():
            names.setdefault(model_type, name if isinstance(name, str) else name[0])
    return {model_type: name for model_type, name in names.items() if model_type not in _NOT_SAMPLE_FIRST}


LANGUAGE_MODELS = tuple(
    name for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in _NOT_SAMPLE_FIRST
)

TIMM = (
    "test_byobnet", "test_coatnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet",
    "test_efficientnet_evos", "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_maxvit",
    "test_nfnet", "test_resnet", "test_vit", "test_vit2", "test_vit3", "test_vit4", "test_vit_relpos",
)  # fmt: skip
"""Small models of the library's own tests, of most of its families."""

TORCHVISION = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "regnet_y_400mf")

DIFFUSERS: Mapping[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
    "AutoencoderKL": {"block_out_channels": (16,), "norm_num_groups": 4, "sample_size": 8},
    "VQModel": {"block_out_channels": (16,), "norm_num_groups": 4, "num_vq_embeddings": 12},
    "DiTTransformer2DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "sample_size": 8,
        "norm_num_groups": 4,
        "dropout": 0.0,
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "PriorTransformer": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 16},
}


@cache
def library_names() -> tuple[str, ...]:
    """Return all names of this file, as `library:name`."""
    return (
        *(f"transformers:{name}" for name in transformers_names()),
        *(f"timm:{name}" for name in TIMM),
        *(f"torchvision:{name}" for name in TORCHVISION),
        *(f"diffusers:{name}" for name in DIFFUSERS),
    )


def library_entry(name: str) -> Entry:
    """Return the entry of a `library:name`."""
    library, _, model = name.partition(":")
    makers: dict[str, Callable[[str], Entry]] = {
        "transformers": _transformers,
        "decoders": lambda name: _transformers(name, num_layers=4),
        # A window and a chunk are shorter than the part of a rank.
        "contexts": lambda name: _transformers(name, num_layers=4, window=5, length=16, is_plain=False),
        "compositions": lambda name: _transformers(
            name,
            num_layers=4,
            window=5,
            length=16,
            changes={} if name in _FITTED else _SPARSE.get(name, {}),
            is_plain=False,
        ),
        "experts": lambda name: _transformers(name, changes=_SPARSE.get(name, {}), is_plain=False),
        "timm": _timm,
        "torchvision": _torchvision,
        "diffusers": _diffusers,
    }
    return makers[library](model)


def _transformers(
    model_type: str,
    num_layers: int = 2,
    window: int = 8,
    length: int = 8,
    changes: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_plain: bool = True,
) -> Entry:
    import transformers  # noqa: PLC0415

    kind = getattr(transformers, transformers_names()[model_type])
    config = kind.config_class()
    for part in _parts(config):
        _shrink(part, num_layers)
        for key, value in {**_FITTED.get(part.model_type, {}), **changes}.items():
            setattr(part, key, value)
        for key in (*_WINDOWS, "attention_chunk_size") if window != _SMALL["sliding_window"] else ():
            if getattr(part, key, None) is not None:
                setattr(part, key, window)
    with torch.device("meta"):
        meta = cast(PreTrainedModel, kind(copy.deepcopy(config)))
    size = sum(parameter.numel() for parameter in meta.parameters())
    assert size <= _MOST_PARAMETERS, f"{size:,} parameters"
    # A router that casts itself in forward computes in float32 from the start.
    keep_dtype = hasattr(config, "router_dtype") or (model_type in _NARROW and is_plain)
    return Entry(
        lambda: kind(copy.deepcopy(config)),
        lambda: _inputs(meta, config, length),
        keep_dtype=keep_dtype,
        has_tensor_plan=bool(meta.tp_plan),
    )


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _shrink(config: PretrainedConfig, depth: int) -> None:
    """Make a configuration small; `depth` is the number of layers. Values per layer are the first ones and the last."""
    num_layers = getattr(config, "num_hidden_layers", None)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif isinstance(value, list | tuple) and len(value) == num_layers and key not in _SMALL:
            setattr(config, key, type(value)([*value[: depth - 1], value[-1]]))
        elif key in _SMALL and (value is not None or key in _SET_IF_NONE):
            small = depth if key in _DEPTHS else _SMALL[key]
            if isinstance(value, list | tuple):
                count = depth if len(value) == num_layers else len(value)
                small = list(small)[:count] if isinstance(small, list | tuple) else [small] * count
                setattr(config, key, type(value)(small))
            elif not isinstance(small, list | tuple):
                setattr(config, key, small)
    if hasattr(config, "kv_lora_rank"):
        config.num_key_value_heads = _SMALL["num_attention_heads"]  # Latent attention has no groups of heads.
    config.use_cache = False
    config._experts_implementation = "eager"  # The others do not support float64.


def _inputs(model: PreTrainedModel, config: PretrainedConfig, length: int) -> Batch:
    """Return the inputs by the name of the model's main input."""
    size = getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else (32, 32)
    match model.main_input_name:
        case "pixel_values":
            channels = getattr(config, "num_channels", 3)
            frames = (getattr(config, "num_frames", 2),) if hasattr(config, "num_frames") else ()
            return {"pixel_values": torch.randn(BATCH, *frames, channels, height, width)}
        case "input_values":
            if hasattr(config, "conv_kernel"):
                return {"input_values": torch.randn(BATCH, 1600)}
            return {"input_values": torch.randn(BATCH, getattr(config, "max_length", 24), config.num_mel_bins)}
        case "input_features":
            features_ = torch.randn(BATCH, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 16))
            return {"input_features": features_, "decoder_input_ids": ids(60, length)()}
        case _:
            tokens = torch.randint(3, 60, (BATCH, length))
            batch = {"input_ids": tokens, "attention_mask": torch.ones(BATCH, length, dtype=torch.int64)}
            if config.is_encoder_decoder:
                batch["decoder_input_ids"] = torch.randint(3, 60, (BATCH, length))
            return batch


def _timm(name: str) -> Entry:
    import timm  # noqa: PLC0415

    released = timm.get_pretrained_cfg(name)
    assert released is not None
    size = released.input_size[-1]
    return Entry(lambda: timm.create_model(name, num_classes=5), lambda: {"x": torch.randn(BATCH, 3, size, size)})


def _torchvision(name: str) -> Entry:
    import torchvision  # noqa: PLC0415

    return Entry(
        lambda: torchvision.models.get_model(name, weights=None, num_classes=5),
        lambda: {"x": torch.randn(BATCH, 3, 48, 48)},
    )


def _diffusers(name: str) -> Entry:
    kind = getattr(importlib.import_module("diffusers"), name)
    inputs: dict[str, Callable[[], Batch]] = {
        "UNet2DConditionModel": lambda: {
            "sample": normal(4, 8, 8)(),
            "timestep": ids(100)(),
            "encoder_hidden_states": normal(5, 16)(),
        },
        "UNet2DModel": lambda: {"sample": normal(3, 8, 8)(), "timestep": ids(100)()},
        "DiTTransformer2DModel": lambda: {
            "hidden_states": normal(4, 8, 8)(),
            "timestep": ids(100)(),
            "class_labels": ids(1000)(),
        },
        "AutoencoderTiny": lambda: {"sample": normal(3, 8, 8)()},
        "PriorTransformer": lambda: {
            "hidden_states": normal(16)(),
            "timestep": ids(100)(),
            "proj_embedding": normal(16)(),
            "encoder_hidden_states": normal(77, 16)(),
            "attention_mask": torch.ones(BATCH, 77).bool(),
        },
    }
    # AutoencoderTiny rounds latents to bytes, and decodes them in float32.
    return Entry(
        lambda: kind(**DIFFUSERS[name]),
        inputs.get(name, lambda: {"sample": normal(3, 8, 8)()}),
        keep_dtype=name == "AutoencoderTiny",
    )
