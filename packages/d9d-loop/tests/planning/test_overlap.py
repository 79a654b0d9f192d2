"""Exposed communication against the equation of the module."""

import pytest

from d9d_loop.planning.overlap import CONTENTION, exposed_seconds


@pytest.mark.parametrize(
    ("computation", "link_share", "expected"),
    [
        (10.0, 0.0, 1.0),
        (10.0, 1.0, 1.0 + CONTENTION * 4.0),
        (10.0, 0.5, 1.0 + CONTENTION * 2.0),
        (3.0, 0.0, 2.0),
        (3.0, 1.0, 1.0 + CONTENTION * 3.0),
    ],
)
def test_the_first_transfer_and_the_slowdown_are_exposed(
    computation: float, link_share: float, expected: float
) -> None:
    assert exposed_seconds(computation, 5.0, first=1.0, link_share=link_share) == pytest.approx(expected)
