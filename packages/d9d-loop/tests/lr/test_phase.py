import math
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from d9d_dist import UserError
from d9d_loop.config._config_keys import kind_of, kinds_of
from d9d_loop.lr import (
    ConstantPhase,
    CosinePhase,
    ExponentialPhase,
    LinearPhase,
    Phase,
    PolynomialPhase,
    RexPhase,
    SqrtPhase,
    piecewise,
)
from d9d_loop.lr.phase import PhaseSettings

# From 1 to 0.2, after a quarter and after half of the phase, computed by hand.
VALUES: list[tuple[PhaseSettings, float, float]] = [
    (LinearPhase(to=0.2), 0.8, 0.6),
    (CosinePhase(to=0.2), 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6),
    (PolynomialPhase(to=0.2, power=3), 0.2 + 0.8 * 27 / 64, 0.3),
    (SqrtPhase(to=0.2), 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5))),
    (RexPhase(to=0.2), 0.2 + 0.8 * 6 / 7, 0.2 + 0.8 * 2 / 3),
    (ExponentialPhase(to=0.2), 0.2**0.25, 0.2**0.5),
]


@pytest.mark.parametrize(("phase", "quarter", "half"), VALUES, ids=lambda value: type(value).__name__)
def test_each_curve_has_its_values_at_a_quarter_and_a_half(phase: PhaseSettings, quarter: float, half: float) -> None:
    found = [phase.value(1.0, progress) for progress in (0.0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx([1.0, quarter, half, 0.2], rel=1e-12)
    assert phase.end(1.0) == 0.2


def test_a_constant_phase_is_constant() -> None:
    assert ConstantPhase().end(0.3) == ConstantPhase().value(0.3, 0.7) == 0.3


def test_curves_may_rise() -> None:
    assert CosinePhase(to=1.0).value(0.5, 0.5) == pytest.approx(0.75)
    assert ExponentialPhase(to=1.0).value(0.25, 0.5) == pytest.approx(0.5)


def test_a_configuration_selects_the_kind_of_phase() -> None:
    adapter: TypeAdapter[PhaseSettings] = TypeAdapter(Phase)
    assert {kind_of(type(phase)) for phase, _, _ in VALUES} | {"constant"} == kinds_of(Phase).keys()
    for phase, _, _ in VALUES:
        assert adapter.validate_python(phase.model_dump(mode="json")) == phase


def test_two_lengths_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"steps = 3 and percent = 5\.0; expected one of them, or neither"):
        ConstantPhase(steps=3, percent=5)


def test_an_exponential_from_zero_is_refused() -> None:
    with pytest.raises(UserError, match=r"starts at 0; expected a start above 0\. Put a linear phase before it"):
        ExponentialPhase(to=0.5).end(0.0)


def _values(phases: Sequence[PhaseSettings], num_steps: int, start: float | None = None) -> list[float]:
    factor = piecewise(phases, num_steps=num_steps, start=start)
    return [factor(step) for step in range(num_steps)]


def test_each_phase_starts_at_the_end_of_the_previous_one() -> None:
    phases = [LinearPhase(steps=3, to=1.0), ConstantPhase(percent=30), LinearPhase(to=0.25)]
    assert _values(phases, 10) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_the_first_phase_may_start_at_another_value() -> None:
    assert _values([LinearPhase(steps=2, to=1.0), LinearPhase(to=0.0)], 5, 0.5) == pytest.approx([0.5, 0.75, 1, 0.5, 0])


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([ConstantPhase(steps=2), LinearPhase(to=0.0)], [1.0, 1.0, 1.0, 0.5, 0.0]),
        ([LinearPhase(steps=2, to=0.5), ConstantPhase()], [1.0, 0.75, 0.5, 0.5, 0.5]),
        ([LinearPhase(to=0.2)], [1.0, 0.8, 0.6, 0.4, 0.2]),
        ([ExponentialPhase(to=0.0625)], [1.0, 0.5, 0.25, 0.125, 0.0625]),
        ([LinearPhase(steps=2, to=1.0), ConstantPhase()], [1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
        ([ConstantPhase()], [1.0] * 5),
    ],
)
def test_a_job_starts_at_the_peak_unless_its_first_phase_leads_to_it(
    phases: list[PhaseSettings], expected: list[float]
) -> None:
    assert _values(phases, 5) == pytest.approx(expected)


def test_a_first_phase_below_a_later_one_needs_a_start() -> None:
    phases = [LinearPhase(steps=2, to=0.5), LinearPhase(to=1.0)]
    with pytest.raises(
        UserError, match=r"start is missing, and the first phase ends at 0\.5, below a later phase; .* 1 to"
    ):
        _values(phases, 5)
    assert _values(phases, 5, 0.0)[-1] == 1.0


def test_a_rate_of_zero_in_every_step_is_an_error() -> None:
    for phases in ([ConstantPhase(steps=2), CosinePhase(to=0.0)], [LinearPhase(to=0.0)]):
        with pytest.raises(
            UserError, match=r"0 in every step: start = 0, and no phase leads to more; .* Use start = 1"
        ):
            _values(phases, 5, 0.0)


def test_a_last_phase_of_one_step_has_its_start_value() -> None:
    assert _values([LinearPhase(steps=2, to=1.0), LinearPhase(to=0.0)], 3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert _values([LinearPhase(to=0.0)], 1, 1.0) == [1.0]


def test_a_schedule_is_constant_after_its_end() -> None:
    assert piecewise([CosinePhase(to=0.3)], num_steps=4, start=1.0)(1000) == pytest.approx(0.3)


@given(parts=st.lists(st.integers(5, 40), min_size=1, max_size=6), num_steps=st.integers(200, 500), rest=st.booleans())
def test_percentages_fill_the_job_within_one_step(parts: list[int], num_steps: int, rest: bool) -> None:
    """Linear phases end at their own index, so values show the number of steps of each."""
    scale = 100 / (sum(parts) + 20 * rest)
    phases: list[PhaseSettings] = [
        LinearPhase(percent=min(part * scale, 100.0), to=index + 1) for index, part in enumerate(parts)
    ]
    if rest:
        phases.append(LinearPhase(to=len(parts) + 1))
    values = _values(phases, num_steps, 0.0)
    assert values[-1] == pytest.approx(len(phases))
    assert values == sorted(values)
    assert values[0] > 0
    done = 0.0
    for index, part in enumerate(parts[: len(phases) - 1]):
        done += part * scale / 100 * num_steps
        reached = sum(value < index + 1 - 1e-9 for value in values)
        assert abs(reached - done) <= 1.0


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "the schedule has 0 phases"),
        (
            [ConstantPhase(), ConstantPhase()],
            "2 of them with neither steps nor percent; expected at least one phase, and",
        ),
        (
            [ConstantPhase(steps=9)],
            "take 9 steps, but the job has 10; expected 10. Omit the",
        ),
        (
            [ConstantPhase(percent=50), ConstantPhase(steps=4)],
            "take 9 steps, but the job has 10; expected 10",
        ),
        (
            [ConstantPhase(steps=9), ConstantPhase(percent=20)],
            "take 11 steps, but the job has 10; expected 10. Shorten",
        ),
        (
            [ConstantPhase(steps=10), ConstantPhase()],
            "take 10 steps, but the job has 10; expected fewer, because one phase takes the remaining steps",
        ),
        (
            [ConstantPhase(percent=60), ConstantPhase(percent=40.1)],
            "take 100.1 percent of the job; expected at most 100.",
        ),
    ],
)
def test_gaps_and_overlaps_are_refused(phases: list[PhaseSettings], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        piecewise(phases, num_steps=10)
