"""RoPE base and scaling in a Hugging Face `config.json`: reading and writing."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import Any, TypeVar

from d9d_dist.errors import UserError
from d9d_modules import rope_scaling as scalings
from d9d_modules.models.decoder_params import DecoderParams, RopeScaling
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_known_keys, require_value
from d9d_state import JsonValue

P = TypeVar("P", bound=DecoderParams)

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


def without_ntk(params: P) -> P:
    """Return equivalent hyperparameters without static NTK scaling, for which `config.json` has only a larger base."""
    if not isinstance(params.rope_scaling, scalings.NtkScaling):
        return params
    theta = params.rope_scaling.base(params.rope_theta, rotary_dim=params.rotated_features)
    return replace(params, rope_theta=theta, rope_scaling=None)


def rope_to_hugging_face(params: DecoderParams, *, rotary_factor: float | None = None) -> dict[str, JsonValue]:
    """Return the RoPE entries of a `config.json`, without static NTK scaling; see `without_ntk`.

    The entries include both formats: `rope_parameters` of `transformers` 5, and `rope_theta` with `rope_scaling`, which
    earlier versions and inference engines read. ctranslate2 reads the base from `rope_scaling`; `transformers` 4 reads
    the original length of LongRoPE at the top level.
    """
    theta, scaling = params.rope_theta, None if params.rope_scaling is None else _written(params.rope_scaling)
    factor: dict[str, JsonValue] = {} if rotary_factor is None else {"partial_rotary_factor": rotary_factor}
    is_long = isinstance(params.rope_scaling, scalings.LongRopeScaling)
    return {
        **factor,
        **({_LENGTH: params.rope_scaling.original_max_positions} if is_long else {}),
        "rope_theta": theta,
        "rope_scaling": scaling and {**scaling, "rope_theta": theta},
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
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(f"config.json has rope_type = {kind!r} in {place}; expected one of {', '.join(_SCALINGS)}.")
    require_value(rope, "type", kind, where=f"{place} of config.json")
    scaling_type = _SCALINGS[kind]
    entries = _fields_by_entry(scaling_type)
    used = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *entries)
    require_known_keys(rope, used=used, irrelevant={}, where=f"{place} of config.json, of rope_type {kind!r},")
    if _LENGTH not in used:
        require_value(config, _LENGTH, config.get("max_position_embeddings"))
    if scaling_type is None:
        return None
    has_ratio = scaling_type in (scalings.YarnScaling, scalings.LongRopeScaling)
    values = {each.name: _value(key, each, rope, config, has_ratio=has_ratio) for key, each in entries.items()}
    if scaling_type is scalings.DynamicNtkScaling:
        values["original_max_positions"] = config_value(config, "max_position_embeddings", int)
    return scaling_type(**values)


def _written(scaling: RopeScaling) -> dict[str, JsonValue]:
    written: dict[str, JsonValue] = {"rope_type": scaling.kind}
    for key, each in _fields_by_entry(type(scaling)).items():
        value = getattr(scaling, each.name)
        if value is not None and not (key in _WEIGHTS and value == 0):
            written[key] = list(value) if isinstance(value, tuple) else value
    return written


def _fields_by_entry(scaling_type: type[Any] | None) -> dict[str, Field[Any]]:
    """Return the fields of a scaling by their entries in the RoPE section."""
    others = {"kind", "original_max_positions"} if scaling_type is scalings.DynamicNtkScaling else {"kind"}
    found = () if scaling_type is None else fields(scaling_type)
    return {_ENTRIES.get(each.name, each.name): each for each in found if each.name not in others}


def _value(key: str, field: Field[Any], rope: HuggingFaceConfig, config: HuggingFaceConfig, *, has_ratio: bool) -> Any:
    """Read the value of a field from the entry `key` of the RoPE section.

    If `has_ratio`, a missing factor is the ratio of the maximum to the pretraining sequence length.
    """
    match key:
        case "original_max_position_embeddings":
            return _original_length(rope, config)
        case "factor" if has_ratio and key not in rope:
            return config_value(config, "max_position_embeddings", int) / _original_length(rope, config)
        case "short_factor" | "long_factor":
            values = rope.get(key)
            if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
                raise UserError(f"config.json has {key} = {values!r}; expected a list of numbers.")
            return tuple(float(value) for value in values)
        case "attention_factor" if key not in rope:
            return None
        case "truncate":
            return config_value(rope, key, bool, default=True)
    default = None if field.default in (MISSING, None) else field.default
    return config_value(rope, key, float, default=default, minimum=0.0 if key in _WEIGHTS else None)


def _original_length(rope: HuggingFaceConfig, config: HuggingFaceConfig) -> int:
    """Return the pretraining sequence length: the scaling's entry, else `max_position_embeddings`."""
    length = config_value(
        rope if _LENGTH in rope else config, _LENGTH if _LENGTH in rope else "max_position_embeddings", int
    )
    # If config and rope section both have the entry, the version of transformers decides which one it uses: require
    # equal values.
    require_value(config, _LENGTH, length)
    return length


_LENGTH = "original_max_position_embeddings"
_WEIGHTS = ("mscale", "mscale_all_dim")
_ENTRIES = {
    "fixed_attention_factor": "attention_factor",
    "long_factors": "long_factor",
    "original_max_positions": _LENGTH,
    "short_factors": "short_factor",
}
"""Entries of the RoPE section by the field of a scaling; other fields have the name of their entry."""

_SCALINGS: Mapping[str, type[Any] | None] = {
    "default": None,
    "linear": scalings.LinearScaling,
    "dynamic": scalings.DynamicNtkScaling,
    "yarn": scalings.YarnScaling,
    "llama3": scalings.Llama3Scaling,
    "longrope": scalings.LongRopeScaling,
}
"""Scaling of each `rope_type`."""
