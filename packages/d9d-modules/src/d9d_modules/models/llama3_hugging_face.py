"""Hugging Face layout of Llama 3: state mapper and `config.json`, in both directions."""

from d9d_modules.models.decoder_hugging_face import (
    DECODER_ENTRIES,
    DECODER_KEYS,
    decoder_from_hugging_face,
    decoder_hugging_face_config,
    require_plain_decoder,
)
from d9d_modules.models.hugging_face_config import (
    HuggingFaceConfig,
    config_keys_in_errors,
    config_value,
    require_known_keys,
    require_value,
)
from d9d_modules.models.hugging_face_irrelevant import LLAMA3_IRRELEVANT
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face
from d9d_modules.models.llama3 import Llama3Params
from d9d_state import JsonValue, StateMapper

LLAMA3_ENTRIES = (*DECODER_ENTRIES, "mlp_bias")
"""Entries of `config.json` that `llama3_params_from_hugging_face` reads."""

_MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def llama3_from_hugging_face(params: Llama3Params) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `Llama3ForCausalLM`; its `inverse()` exports.

    Args:
        params: Hyperparameters of the model.
    """
    return decoder_from_hugging_face(params)


def llama3_hugging_face_config(params: Llama3Params) -> dict[str, JsonValue]:
    """Return the `config.json` of an exported `Llama3ForCausalLM` for `transformers` and inference engines.

    `transformers` loads only models whose number of heads divides the hidden size.

    Raises:
        UserError: If `config.json` cannot represent the RoPE scaling.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_hugging_face_config(params),
        "mlp_bias": False,
    }


def llama3_params_from_hugging_face(config: HuggingFaceConfig) -> Llama3Params:
    """Read the hyperparameters from the parsed `config.json` of a Llama 3 checkpoint.

    Raises:
        UserError: If it describes another family, lacks an entry, or needs an unsupported feature.
    """
    require_value(config, "model_type", "llama", required=True)
    require_known_keys(config, used=LLAMA3_ENTRIES, irrelevant=LLAMA3_IRRELEVANT)
    require_plain_decoder(config)
    require_value(config, "mlp_bias", supported=False)
    # head_dim and num_key_value_heads may be missing or null.
    config = {key: value for key, value in config.items() if value is not None or key not in _MAY_BE_NULL}
    hidden_size = config_value(config, "hidden_size", int)
    num_heads = config_value(config, "num_attention_heads", int)
    theta, scaling = rope_from_hugging_face(config)
    with config_keys_in_errors(DECODER_KEYS):
        return Llama3Params(
            vocab_size=config_value(config, "vocab_size", int),
            hidden_size=hidden_size,
            num_layers=config_value(config, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=config_value(config, "num_key_value_heads", int, default=num_heads),
            head_dim=config_value(config, "head_dim", int, default=hidden_size // num_heads),
            intermediate_size=config_value(config, "intermediate_size", int),
            tie_word_embeddings=config_value(config, "tie_word_embeddings", bool, default=False),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=config_value(config, "rms_norm_eps", float, default=1e-6),
            initializer_range=config_value(config, "initializer_range", float, default=0.02),
            max_position_embeddings=config_value(config, "max_position_embeddings", int, default=2048),
        )
