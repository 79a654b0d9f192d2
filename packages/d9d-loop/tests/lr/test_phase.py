import math

import pytest
from pydantic import TypeAdapter, ValidationError

from d9d_dist import UserError
from d9d_loop.lr import (
    ConstantPhase,
    CosinePhase,
    ExponentialPhase,
    LinearPhase,
    Phase,
    PolynomialPhase,
    RexPhase,
    SqrtPhase,
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
    for phase, _, _ in VALUES:
        assert adapter.validate_python(phase.model_dump(mode="json")) == phase


def test_two_lengths_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"steps = 3 and percent = 5\.0; expected one of them, or neither"):
        ConstantPhase(steps=3, percent=5)


def test_an_exponential_from_zero_is_refused() -> None:
    with pytest.raises(UserError, match=r"starts at 0; expected a start above 0\. Put a linear phase before it"):
        ExponentialPhase(to=0.5).end(0.0)
