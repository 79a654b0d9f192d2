"""Rotary positions in a Hugging Face `config.json`: their base, and how they are scaled, both ways."""

from collections.abc import Mapping

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_params import DecoderParams, RopeScaling
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_value
from d9d_modules.rope_scaling import DynamicNtkScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from d9d_state import JsonValue


def rope_from_hugging_face(config: HuggingFaceConfig) -> tuple[float, RopeScaling | None]:
    """Base of the rotary wavelengths, and their scaling, from whichever place they are written in.

    Raises:
        UserError: If the base or a value of the scaling is missing, or there is no such scaling.
    """
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(written, Mapping):
        raise UserError(f"config.json has rope parameters {written!r}; expected an object.")
    # An entry of null is one that is left out.
    rope = {str(key): value for key, value in written.items() if value is not None}
    require_value(rope, "partial_rotary_factor", 1.0)
    require_value(config, "partial_rotary_factor", 1.0)
    theta = config_value(rope if "rope_theta" in rope else config, "rope_theta", float)
    return theta, _scaling(rope, config)


def rope_to_hugging_face(params: DecoderParams) -> dict[str, JsonValue]:
    """The entries of a `config.json` that say how positions are rotated.

    Raises:
        UserError: If the layout has no place for a value.
    """
    plain: dict[str, JsonValue] = {"rope_theta": params.rope_theta}
    return plain if params.rope_scaling is None else {**plain, "rope_scaling": _written(params.rope_scaling, params)}


def _scaling(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=config_value(rope, "factor", float))
        case "dynamic":
            return DynamicNtkScaling(
                factor=config_value(rope, "factor", float),
                original_max_positions=config_value(config, "max_position_embeddings", int),
            )
        case "yarn":
            return YarnScaling(
                factor=_factor(rope, config),
                original_max_positions=_original_length(rope, config),
                beta_fast=config_value(rope, "beta_fast", float, default=32.0),
                beta_slow=config_value(rope, "beta_slow", float, default=1.0),
                mscale=config_value(rope, "mscale", float, default=0.0),
                mscale_all_dim=config_value(rope, "mscale_all_dim", float, default=0.0),
                fixed_attention_factor=_attention_factor(rope),
                truncate=config_value(rope, "truncate", bool, default=True),
            )
        case "llama3":
            return Llama3Scaling(
                factor=config_value(rope, "factor", float),
                low_freq_factor=config_value(rope, "low_freq_factor", float),
                high_freq_factor=config_value(rope, "high_freq_factor", float),
                original_max_positions=_original_length(rope, config),
            )
        case "longrope":
            return LongRopeScaling(
                short_factors=_numbers(rope, "short_factor"),
                long_factors=_numbers(rope, "long_factor"),
                factor=_factor(rope, config),
                original_max_positions=_original_length(rope, config),
                fixed_attention_factor=_attention_factor(rope),
            )
        case _:
            raise UserError(
                f"config.json asks for rope_type {kind!r}; expected default, linear, dynamic, yarn, llama3 or longrope."
            )


def _written(scaling: RopeScaling, params: DecoderParams) -> dict[str, JsonValue]:
    match scaling:
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicNtkScaling():
            if scaling.original_max_positions != params.max_position_embeddings:
                raise UserError(
                    f"original_max_positions = {scaling.original_max_positions} of the dynamic NTK scaling, "
                    f"max_position_embeddings = {params.max_position_embeddings}; a config.json has one number for "
                    "both: expected them to be equal."
                )
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                **({"mscale": scaling.mscale} if scaling.mscale else {}),
                **({"mscale_all_dim": scaling.mscale_all_dim} if scaling.mscale_all_dim else {}),
                **_attention_factor_entry(scaling.fixed_attention_factor),
            }
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case LongRopeScaling():
            return {
                "rope_type": "longrope",
                "factor": scaling.factor,
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "original_max_position_embeddings": scaling.original_max_positions,
                **_attention_factor_entry(scaling.fixed_attention_factor),
            }


def _original_length(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> int:
    """Length of the first training: with the scaling, beside it (Phi-3), or that of the model."""
    key = "original_max_position_embeddings"
    for place in (config, rope):
        if place.get(key) is not None:
            return config_value(place, key, int)
    return config_value(config, "max_position_embeddings", int)


def _factor(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> float:
    """The factor, or what follows from both lengths where it is left out."""
    if "factor" in rope:
        return config_value(rope, "factor", float)
    return config_value(config, "max_position_embeddings", int) / _original_length(rope, config)


def _attention_factor(rope: HuggingFaceConfig) -> float | None:
    return config_value(rope, "attention_factor", float) if "attention_factor" in rope else None


def _attention_factor_entry(factor: float | None) -> dict[str, JsonValue]:
    return {} if factor is None else {"attention_factor": factor}


def _numbers(rope: HuggingFaceConfig, key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise UserError(f"config.json has {key} = {values!r}; expected a list of numbers.")
    return tuple(float(value) for value in values)
