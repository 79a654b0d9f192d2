"""RoPE base and scaling in a Hugging Face `config.json`: reading and writing."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from d9d_dist.errors import UserError
from d9d_modules import rope_scaling as scalings
from d9d_modules.models.decoder_params import DecoderParams, RopeScaling
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_known_keys, require_value
from d9d_state import JsonValue

ROPE_ENTRIES = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Entries of `config.json` that `rope_from_hugging_face` reads."""


def rope_from_hugging_face(
    config: HuggingFaceConfig, *, rotary_factor: float = 1.0
) -> tuple[float, RopeScaling | None]:
    """Read the RoPE base and the RoPE scaling from a `config.json`.

    As in `transformers`, `rope_scaling` has precedence over `rope_parameters`. The base is in the same object, or at
    the top level. Missing, unknown and contradictory entries raise a `UserError`. So does a `partial_rotary_factor`
    other than `rotary_factor`.
    """
    places = {key: _entries(config, key) for key in ("rope_scaling", "rope_parameters")}
    for place, entries in (("config.json", config), *((f"{key} of config.json", each) for key, each in places.items())):
        require_value(entries, "partial_rotary_factor", rotary_factor, where=place)
    chosen, *others = [key for key, rope in places.items() if rope] or ["rope_parameters"]
    rope = places[chosen]
    if "rope_theta" not in rope and config.get("rope_theta") is None:
        raise UserError(
            f"config.json has no 'rope_theta' for {chosen} = {rope}; expected the RoPE base, which transformers "
            f"defaults to 10000.0. Write it into {chosen}."
        )
    theta = config_value(rope if "rope_theta" in rope else config, "rope_theta", float)
    scaling = _scaling(rope, config, chosen)
    for other in others:
        if _scaling(places[other], config, other) != scaling:
            raise UserError(
                f"config.json has {chosen} = {rope} and {other} = {places[other]}; expected only one of them, or equal "
                "values. Write rope_theta and the scaling into rope_parameters, and delete rope_scaling."
            )
    for place, entries in (("config.json", config), *places.items()):
        written = entries.get("rope_theta")
        if written is not None and written != theta:
            raise UserError(
                f"{place} has rope_theta = {written!r}, but {chosen} uses {theta}; expected one base. Write it only "
                "into rope_parameters."
            )
    return theta, scaling


def rotary_factor_from_hugging_face(config: HuggingFaceConfig, *, default: float) -> float:
    """Read the rotated fraction of each head, `partial_rotary_factor`, at the top level or beside the RoPE base."""
    for entries in (_entries(config, "rope_parameters"), _entries(config, "rope_scaling"), config):
        if "partial_rotary_factor" in entries:
            return config_value(entries, "partial_rotary_factor", float)
    return default


def rope_to_hugging_face(params: DecoderParams, *, rotary_factor: float | None = None) -> dict[str, JsonValue]:
    """Return the RoPE entries of a `config.json`; raise a `UserError` if it cannot represent the scaling.

    The entries include both formats: `rope_parameters` of `transformers` 5, and `rope_theta` with `rope_scaling`, which
    earlier versions and inference engines read.
    """
    theta, scaling = params.rope_theta, None
    if isinstance(params.rope_scaling, scalings.NtkScaling):  # exported as the equivalent, larger `rope_theta`
        theta = params.rope_scaling.base(theta, rotary_dim=params.rotated_features)
    elif params.rope_scaling is not None:
        scaling = _written(params.rope_scaling, params)
    factor: dict[str, JsonValue] = {} if rotary_factor is None else {"partial_rotary_factor": rotary_factor}
    return {
        **factor,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": theta,
            **factor,
            **({"rope_type": "default"} if scaling is None else scaling),
        },
    }


def _entries(config: HuggingFaceConfig, key: str) -> dict[str, object]:
    """Return the object at `key` without null entries, which count as missing."""
    written = config.get(key)
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise UserError(f"config.json has {key} = {written!r}; expected an object.")
    return {str(name): value for name, value in written.items() if value is not None}


def _scaling(rope: HuggingFaceConfig, config: HuggingFaceConfig, place: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FORMS:
        raise UserError(f"config.json has rope_type = {kind!r} in {place}; expected one of {', '.join(_FORMS)}.")
    require_value(rope, "type", kind, where=f"{place} of config.json")
    scaling_type, entries = _FORMS[kind]
    used = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *entries)
    require_known_keys(rope, used=used, irrelevant={}, where=f"{place} of config.json, of rope_type {kind!r},")
    if "original_max_position_embeddings" not in used:
        require_value(config, "original_max_position_embeddings", config.get("max_position_embeddings"))
    if scaling_type is None:
        return None
    values: dict[str, Any] = {field: read(rope, config) for field, read in entries.values()}
    if scaling_type is scalings.DynamicNtkScaling:
        values["original_max_positions"] = config_value(config, "max_position_embeddings", int)
    return scaling_type(**values)


def _written(scaling: RopeScaling, params: DecoderParams) -> dict[str, JsonValue]:
    length = params.max_position_embeddings
    if isinstance(scaling, scalings.DynamicNtkScaling) and scaling.original_max_positions != length:
        raise UserError(
            f"the dynamic NTK scaling has original_max_positions = {scaling.original_max_positions}, the model "
            f"max_position_embeddings = {length}; config.json has one entry for both: expected them to be equal."
        )
    kind, entries = next((kind, entries) for kind, (each, entries) in _FORMS.items() if each is type(scaling))
    values = {key: getattr(scaling, field) for key, (field, _) in entries.items()}
    written: dict[str, JsonValue] = {"rope_type": kind}
    for key, value in values.items():
        if value is not None and not (key in ("mscale", "mscale_all_dim") and value == 0):
            written[key] = list(value) if isinstance(value, tuple) else value
    return written


def _original_length(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> int:
    """Return the pretraining sequence length: the scaling's entry, else `max_position_embeddings`."""
    key = "original_max_position_embeddings"
    length = config_value(rope if key in rope else config, key if key in rope else "max_position_embeddings", int)
    # If config and rope section both have the entry, the version of transformers decides which one it uses: require
    # equal values.
    require_value(config, key, length)
    return length


def _factor(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> float:
    """Return the scaling factor, by default the ratio of the maximum to the pretraining sequence length."""
    if "factor" in rope:
        return config_value(rope, "factor", float)
    return config_value(config, "max_position_embeddings", int) / _original_length(rope, config)


def _attention_factor(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> float | None:
    del config
    return config_value(rope, "attention_factor", float) if "attention_factor" in rope else None


def _numbers(key: str, rope: HuggingFaceConfig, config: HuggingFaceConfig) -> tuple[float, ...]:
    del config
    values = rope.get(key)
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise UserError(f"config.json has {key} = {values!r}; expected a list of numbers.")
    return tuple(float(value) for value in values)


def _number(key: str, default: float | None = None, minimum: float | None = None) -> tuple[str, Callable[..., Any]]:
    """Return the name of a field, and the function that reads its value from the entry `key`."""
    return key, lambda rope, config: config_value(rope, key, float, default=default, minimum=minimum)


_Read: TypeAlias = Callable[[HuggingFaceConfig, HuggingFaceConfig], Any]
"""Function that reads a value from the RoPE section and the whole configuration."""

_LENGTH: tuple[str, _Read] = ("original_max_positions", _original_length)
_FACTOR: tuple[str, _Read] = ("factor", _factor)
_ATTENTION: tuple[str, _Read] = ("fixed_attention_factor", _attention_factor)
_FORMS: Mapping[str, tuple[type[Any] | None, Mapping[str, tuple[str, _Read]]]] = {
    "default": (None, {}),
    "linear": (scalings.LinearScaling, {"factor": _number("factor")}),
    "dynamic": (scalings.DynamicNtkScaling, {"factor": _number("factor")}),
    "yarn": (
        scalings.YarnScaling,
        {
            "factor": _FACTOR,
            "original_max_position_embeddings": _LENGTH,
            "beta_fast": _number("beta_fast", 32.0),
            "beta_slow": _number("beta_slow", 1.0),
            "mscale": _number("mscale", 0.0, 0.0),
            "mscale_all_dim": _number("mscale_all_dim", 0.0, 0.0),
            "attention_factor": _ATTENTION,
            "truncate": ("truncate", lambda rope, config: config_value(rope, "truncate", bool, default=True)),
        },
    ),
    "llama3": (
        scalings.Llama3Scaling,
        {
            "factor": _number("factor"),
            "low_freq_factor": _number("low_freq_factor"),
            "high_freq_factor": _number("high_freq_factor"),
            "original_max_position_embeddings": _LENGTH,
        },
    ),
    "longrope": (
        scalings.LongRopeScaling,
        {
            "short_factor": ("short_factors", partial(_numbers, "short_factor")),
            "long_factor": ("long_factors", partial(_numbers, "long_factor")),
            "factor": _FACTOR,
            "original_max_position_embeddings": _LENGTH,
            "attention_factor": _ATTENTION,
        },
    ),
}
"""Scaling of each `rope_type`, and the field and reader of each entry besides the type and the base."""
