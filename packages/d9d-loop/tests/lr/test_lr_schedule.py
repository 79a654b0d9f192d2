import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_loop import TrainerConfig, validate_config
from d9d_loop.lr import CosinePhase, LinearPhase
from d9d_loop.lr.lr_schedule import PiecewiseConfig, WarmupCosineConfig, WsdConfig


def _factors(num_steps: int, warmup_steps: int, final_fraction: float) -> list[float]:
    schedule = WarmupCosineConfig(warmup_steps=warmup_steps, final_fraction=final_fraction).build(num_steps)
    return [schedule(step) for step in range(num_steps)]


def test_warms_up_and_decays() -> None:
    expected = [0.25, 0.5, 0.75, 1.0, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(1, 5))]
    assert _factors(8, 3, 0.1) == pytest.approx(expected, rel=1e-12)


def test_a_schedule_without_warmup_starts_at_the_peak() -> None:
    assert _factors(3, 0, 0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert _factors(1, 0, 0.5) == [1.0]


def test_a_final_fraction_of_one_is_a_constant() -> None:
    assert _factors(5, 0, 1.0) == [1.0] * 5


@given(num_steps=st.integers(1, 50), warmup_steps=st.integers(0, 60), final_fraction=st.floats(0, 1))
def test_warmup_rises_and_decay_falls(num_steps: int, warmup_steps: int, final_fraction: float) -> None:
    factors = _factors(num_steps, warmup_steps, final_fraction)
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup_steps] == sorted(factors[:warmup_steps])
    assert all(after <= before + 1e-15 for before, after in pairwise(factors[warmup_steps:]))
    if num_steps > warmup_steps + 1:
        assert factors[warmup_steps] == pytest.approx(1.0)
        assert factors[-1] == pytest.approx(final_fraction)


def test_a_schedule_is_constant_after_the_last_step() -> None:
    assert WarmupCosineConfig(final_fraction=0.25).build(4)(100) == pytest.approx(0.25)


def test_warmup_stable_decay_has_three_phases() -> None:
    schedule = WsdConfig(warmup_steps=3, decay_percent=40, decay="linear", final_fraction=0.25).build(10)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [schedule(step) for step in range(10)] == pytest.approx(expected)
    assert WsdConfig().build(10)(0) == 1.0
    assert WsdConfig(decay="sqrt").build(10)(9) == pytest.approx(0.0)
    with pytest.raises(UserError, match="take 11 steps, but the job has 10; expected fewer"):
        WsdConfig(warmup_steps=9).build(10)


def test_phases_are_read_from_a_configuration() -> None:
    phases = [{"kind": "linear", "steps": 2, "to": 1}, {"kind": "cosine", "to": 0.1}]
    section = {"kind": "piecewise", "phases": phases}
    config = validate_config(TrainerConfig, {"steps": 9, "batch": {"global_size": 1}, "lr_schedule": section})
    expected = PiecewiseConfig(phases=(LinearPhase(steps=2, to=1.0), CosinePhase(to=0.1)))
    assert config.lr_schedule == expected
    assert [config.lr_schedule.build(9)(step) for step in range(9)] == _factors(9, 2, 0.1)


def test_the_error_for_a_gap_names_the_configuration_section() -> None:
    with pytest.raises(
        UserError, match=r"lr_schedule\.phases: the phases of the schedule take 2 steps, but the job has 9"
    ):
        PiecewiseConfig(phases=(LinearPhase(steps=2, to=1.0),)).build(9)


def test_a_phase_of_unknown_kind_is_refused() -> None:
    section = {"kind": "piecewise", "phases": [{"steps": 2}]}
    with pytest.raises(UserError, match=r"lr_schedule\.phases\.0"):
        validate_config(TrainerConfig, {"steps": 9, "batch": {"global_size": 1}, "lr_schedule": section})
