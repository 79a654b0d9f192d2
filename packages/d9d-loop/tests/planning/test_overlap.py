"""Exposed communication against the equation of the module."""

import pytest

from d9d_loop.planning.overlap import CONTENTION, exposed_seconds


@pytest.mark.parametrize(
    ("computation", "contends", "expected"),
    [(10.0, False, 1.0), (10.0, True, 1.0 + CONTENTION * 4.0), (3.0, False, 2.0), (3.0, True, 1.0 + CONTENTION * 3.0)],
)
def test_the_first_transfer_and_the_slowdown_are_exposed(computation: float, contends: bool, expected: float) -> None:
    assert exposed_seconds(computation, 5.0, first=1.0, contends=contends) == pytest.approx(expected)
