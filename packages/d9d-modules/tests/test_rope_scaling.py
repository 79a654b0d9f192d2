import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from d9d_dist import UserError
from d9d_modules.models.decoder_params import RopeScaling
from d9d_modules.rope_scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    YarnScaling,
)

FACTORS = st.floats(0.5, 40.0)
LENGTHS = st.integers(1, 400)
ORIGINAL = st.sampled_from([16, 100, 8192])


def _expected(
    kind: str, parameters: dict[str, Any], *, length: int, partial: float, original: int
) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=original,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10_000.0,
            "partial_rotary_factor": partial,
            **parameters,
        },
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies, factor


def _compare(scaling: RotaryScaling, expected: tuple[Tensor, float], *, length: int, partial: float) -> None:
    rotary_dim = int(32 * partial)
    frequencies = scaling.frequencies(10_000.0, rotary_dim=rotary_dim, length=torch.tensor(length))
    assert frequencies.dtype == torch.float32
    # Each side rounds at most a dozen times, by half an eps: exponent, base, power, division, and blend.
    torch.testing.assert_close(frequencies, expected[0], rtol=12 * torch.finfo(torch.float32).eps, atol=0)
    assert scaling.attention_factor == pytest.approx(expected[1], rel=1e-12)


@settings(max_examples=15)
@given(factor=FACTORS, length=LENGTHS, partial=st.sampled_from([0.25, 1.0]))
def test_linear_scaling_agrees_with_transformers(factor: float, length: int, partial: float) -> None:
    expected = _expected("linear", {"factor": factor}, length=length, partial=partial, original=16)
    _compare(LinearScaling(factor=factor), expected, length=length, partial=partial)


@settings(max_examples=25)
@example(factor=20.949544392486505, length=1, partial=0.25, original=100)  # 1 = 20.9 - 19.9 would cancel
@given(factor=FACTORS, length=LENGTHS, partial=st.sampled_from([0.25, 1.0]), original=ORIGINAL)
def test_dynamic_ntk_scaling_agrees_with_transformers(
    factor: float, length: int, partial: float, original: int
) -> None:
    expected = _expected("dynamic", {"factor": factor}, length=length, partial=partial, original=original)
    scaling = DynamicNtkScaling(factor=factor, original_max_positions=original)
    _compare(scaling, expected, length=length, partial=partial)


@settings(max_examples=40)
@given(
    factor=FACTORS,
    original=ORIGINAL,
    partial=st.sampled_from([0.25, 1.0]),
    beta_fast=st.sampled_from([32.0, 4.0, 8.5]),
    beta_slow=st.sampled_from([1.0, 4.0]),
    mscales=st.sampled_from([(0.0, 0.0), (1.0, 1.0), (0.7, 0.4), (0.7, 0.0)]),
    attention_factor=st.sampled_from([None, None, 1.25]),
    truncate=st.booleans(),
)
@example(
    original=10**9,
    beta_fast=1e8,
    beta_slow=1.0,
    partial=1.0,
    mscales=(0.0, 0.0),
    attention_factor=None,
    truncate=False,
    factor=8.0,
)  # a boundary beyond the last pair
@example(
    original=8192,
    beta_fast=4.0,
    beta_slow=4.0,
    partial=1.0,
    mscales=(0.0, 0.0),
    attention_factor=None,
    truncate=False,
    factor=8.0,
)  # both boundaries coincide
def test_yarn_scaling_agrees_with_transformers(  # noqa: PLR0917  (drawn by name)
    factor: float,
    original: int,
    partial: float,
    beta_fast: float,
    beta_slow: float,
    mscales: tuple[float, float],
    attention_factor: float | None,
    truncate: bool,
) -> None:
    parameters = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "mscale": mscales[0],
        "mscale_all_dim": mscales[1],
        "attention_factor": attention_factor,
        "truncate": truncate,
    }
    expected = _expected("yarn", parameters, length=1, partial=partial, original=original)
    scaling = YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=mscales[0],
        mscale_all_dim=mscales[1],
        fixed_attention_factor=attention_factor,
        truncate=truncate,
    )
    _compare(scaling, expected, length=1, partial=partial)


@settings(max_examples=25)
@given(factor=FACTORS, original=ORIGINAL, low=st.floats(0.5, 2.0), width=st.floats(0.1, 8.0))
def test_llama3_scaling_agrees_with_transformers(factor: float, original: int, low: float, width: float) -> None:
    parameters = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + width,
        "original_max_position_embeddings": original,
    }
    expected = _expected("llama3", parameters, length=1, partial=1.0, original=original)
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=low, high_freq_factor=low + width, original_max_positions=original
    )
    frequencies = scaling.frequencies(10_000.0, rotary_dim=32, length=torch.tensor(1))
    # The blend weight divides a difference of up to low + width by the width. The smallest frequency is 1 / factor.
    rounding = torch.finfo(torch.float32).eps * (12 + 4 * factor * (low + width) / width)
    torch.testing.assert_close(frequencies, expected[0], rtol=rounding, atol=0)
    assert scaling.attention_factor == expected[1]


@settings(max_examples=25)
@given(
    factor=FACTORS,
    length=st.sampled_from([1, 16, 17, 100, 300]),
    original=ORIGINAL,
    factors=st.lists(st.floats(1.0, 60.0), min_size=32, max_size=32),
    attention_factor=st.sampled_from([None, 1.25]),
)
def test_longrope_scaling_agrees_with_transformers(
    factor: float, length: int, original: int, factors: list[float], attention_factor: float | None
) -> None:
    parameters = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "short_factor": factors[:16],
        "long_factor": factors[16:],
        "attention_factor": attention_factor,
    }
    expected = _expected("longrope", parameters, length=length, partial=1.0, original=original)
    scaling = LongRopeScaling(
        short_factors=tuple(factors[:16]),
        long_factors=tuple(factors[16:]),
        factor=factor,
        original_max_positions=original,
        fixed_attention_factor=attention_factor,
    )
    _compare(scaling, expected, length=length, partial=1.0)


def test_mscale_sets_the_temperature_as_in_deepseek() -> None:
    scaling = YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert scaling.attention_factor == 1.0
    assert scaling.temperature(1.0) == pytest.approx(1.3688879454113936)
    assert YarnScaling(factor=0.5, original_max_positions=4096).temperature(1.0) == 1.0


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (LinearScaling, {"factor": 0.0}, r"LinearScaling got factor = 0\.0; expected above 0"),
        (LinearScaling, {"factor": math.nan}, r"LinearScaling got factor = nan; expected above 0"),
        (
            LongRopeScaling,
            {"short_factors": (1.0,), "long_factors": (1.0,), "factor": 2.0, "original_max_positions": 1},
            r"LongRopeScaling got original_max_positions = 1; expected at least 2",
        ),
        (
            DynamicNtkScaling,
            {"factor": 2.0, "original_max_positions": 0},
            r"DynamicNtkScaling got original_max_positions = 0; expected above 0",
        ),
        (
            YarnScaling,
            {"factor": 2.0, "original_max_positions": 16, "beta_fast": 1.0, "beta_slow": 2.0},
            r"beta_fast = 1\.0, beta_slow = 2\.0; expected beta_fast >= beta_slow",
        ),
        (
            Llama3Scaling,
            {"factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_positions": 16},
            r"low_freq_factor = 4\.0, high_freq_factor = 4\.0; expected high_freq_factor > low_freq_factor",
        ),
        (
            LongRopeScaling,
            {"short_factors": (1.0,), "long_factors": (1.0, 2.0), "factor": 2.0, "original_max_positions": 16},
            r"1 short_factors and 2 long_factors; expected one of each per rotated pair",
        ),
        (
            LongRopeScaling,
            {"short_factors": (), "long_factors": (), "factor": 2.0, "original_max_positions": 16},
            r"LongRopeScaling got short_factors = 0\.0; expected above 0",
        ),
    ],
)
def test_invalid_scaling_values_raise(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**values)


def test_sizes_that_do_not_match_a_scaling_raise() -> None:
    longrope = LongRopeScaling(short_factors=(1.0,), long_factors=(2.0,), factor=2.0, original_max_positions=16)
    with pytest.raises(
        UserError, match=r"LongRopeScaling has 1 factors for 8 rotated features; expected one per .* 4\."
    ):
        longrope.frequencies(100.0, rotary_dim=8, length=torch.tensor(3))
    with pytest.raises(UserError, match=r"2 rotated features with NTK scaling; expected at least 4"):
        DynamicNtkScaling(factor=2.0, original_max_positions=16).frequencies(
            100.0, rotary_dim=2, length=torch.tensor(3)
        )


@pytest.mark.parametrize(
    ("written", "scaling"),
    [
        ({"kind": "linear", "factor": 2.0}, LinearScaling(factor=2.0)),
        (
            {"kind": "dynamic", "factor": 2.0, "original_max_positions": 8},
            DynamicNtkScaling(factor=2.0, original_max_positions=8),
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_positions": 8, "truncate": False},
            YarnScaling(factor=2.0, original_max_positions=8, truncate=False),
        ),
        (
            {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_positions": 8,
            },
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8),
        ),
        (
            {
                "kind": "longrope",
                "short_factors": [1, 2.0],
                "long_factors": [3.0, 4.0],
                "factor": 2.0,
                "original_max_positions": 8,
            },
            LongRopeScaling(short_factors=(1.0, 2.0), long_factors=(3.0, 4.0), factor=2.0, original_max_positions=8),
        ),
    ],
)
def test_a_configuration_selects_a_scaling_by_its_kind(written: dict[str, Any], scaling: RopeScaling) -> None:
    found = TypeAdapter(RopeScaling).validate_python(written)
    assert type(found) is type(scaling)
    assert found == scaling


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"kind": "yarm", "factor": 2.0}, r"'yarm' found using 'kind' does not match any of the expected tags"),
        ({"factor": 2.0}, r"Unable to extract tag using discriminator 'kind'"),
        ({"kind": "linear", "factor": 0.0}, r"LinearScaling got factor = 0\.0; expected above 0\."),
        ({"kind": "linear", "factor": 2.0, "beta_fast": 3.0}, r"linear\.beta_fast\n  Unexpected keyword argument"),
    ],
)
def test_an_unknown_scaling_kind_raises(written: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(RopeScaling, config=ConfigDict(extra="forbid")).validate_python(written)
