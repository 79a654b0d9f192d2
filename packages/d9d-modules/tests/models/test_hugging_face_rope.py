import json
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_modules import (
    LLAMA3,
    DynamicNtkScaling,
    LinearScaling,
    Llama3Params,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)
from d9d_modules.models.decoder_params import RopeScaling
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face


def _params(scaling: RopeScaling | None) -> Llama3Params:
    return Llama3Params(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        rope_theta=5000.0,
        rope_scaling=scaling,
        max_position_embeddings=64,
    )


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(factor=2.0),
        DynamicNtkScaling(factor=2.0, original_max_positions=64),
        YarnScaling(factor=2.0, original_max_positions=32),
        YarnScaling(
            factor=2.0,
            original_max_positions=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.4,
            fixed_attention_factor=1.5,
            truncate=False,
        ),
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
        LongRopeScaling(short_factors=(1.0, 2.0), long_factors=(3.0, 4.0), factor=2.0, original_max_positions=32),
        LongRopeScaling(
            short_factors=(1.0, 2.0),
            long_factors=(3.0, 4.0),
            factor=2.0,
            original_max_positions=32,
            fixed_attention_factor=1.5,
        ),
    ],
)
def test_every_scaling_survives_the_round_trip(scaling: RopeScaling | None) -> None:
    written = json.loads(json.dumps(LLAMA3.write(_params(scaling))))
    assert rope_from_hugging_face(written) == (5000.0, scaling)


def test_other_programs_find_the_base_beside_the_scaling_and_the_length_of_longrope() -> None:
    longrope = LongRopeScaling(short_factors=(1.0,) * 4, long_factors=(2.0,) * 4, factor=4.0, original_max_positions=32)
    written = LLAMA3.write(_params(longrope))
    assert written["rope_scaling"] == written["rope_parameters"]  # ctranslate2 reads the base there
    assert written["original_max_position_embeddings"] == 32  # transformers 4 reads it there
    assert "original_max_position_embeddings" not in LLAMA3.write(_params(None))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": 5000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
)
def test_theta_is_found_in_either_place(config: dict[str, Any]) -> None:
    assert rope_from_hugging_face(config) == (5000.0, None)


def test_missing_entries_default_to_the_lengths() -> None:
    yarn = {"type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    config = {"rope_theta": 5000.0, "max_position_embeddings": 128, "rope_scaling": yarn}
    assert rope_from_hugging_face(config)[1] == YarnScaling(factor=4.0, original_max_positions=32)
    config = {"rope_theta": 5000.0, "max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 3}}
    assert rope_from_hugging_face(config)[1] == YarnScaling(factor=3.0, original_max_positions=128)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": 5e3, "rope_scaling": YARN},
        {"rope_parameters": {**YARN, "rope_theta": 5e3}},
        {"rope_theta": 5e3, "rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 5e3}},
        {"rope_theta": 5e3, "rope_scaling": YARN, "rope_parameters": {}},
    ],
)
def test_a_scaling_is_found_in_either_place(places: dict[str, Any]) -> None:
    config = {"max_position_embeddings": 128, **places}
    assert rope_from_hugging_face(config) == (5e3, YarnScaling(factor=4.0, original_max_positions=32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": 5e3, "rope_scaling": YARN},
            r"has rope_scaling = .*yarn.* and rope_parameters = .*default.*; expected only one of them",
        ),
        ({"rope_theta": 1e4}, r"config\.json has rope_theta = 10000\.0, but rope_parameters uses"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3, "mscale_all_dim": 1.0}},
            r"rope_parameters of config\.json, of rope_type 'linear', has mscale_all_dim = 1\.0; expected only",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 5e3}},
            r"has type = 'yarn'; only 'linear' is supported",
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 5e3}, "original_max_position_embeddings": 64},
            r"has original_max_position_embeddings = 64; only 32 is supported",
        ),
    ],
)
def test_conflicting_rope_entries_raise(changes: dict[str, Any], message: str) -> None:
    config = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, **changes}
    with pytest.raises(UserError, match=message):
        rope_from_hugging_face(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"config\.json has no 'rope_theta'"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, r"has rope_scaling = 'yarn'; expected an object"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, r"has no 'factor'"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "new"}},
            r"rope_type = 'new' in rope_scaling; expected one of default, linear, dynamic",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1, "2"]}},
            r"has short_factor = \[1, '2'\]; expected a list of numbers",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"partial_rotary_factor": 0.5}},
            r"has partial_rotary_factor = 0\.5; only 1\.0 is supported",
        ),
    ],
)
def test_invalid_rope_entries_raise(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rope_from_hugging_face(config)


def test_an_unrepresentable_length_raises() -> None:
    scaling = DynamicNtkScaling(factor=2.0, original_max_positions=32)
    with pytest.raises(UserError, match=r"rope_scaling = .*=32\) \(read as .*=64\)\); expected the values in par"):
        LLAMA3.write(_params(scaling))
