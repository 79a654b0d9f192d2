"""Goodput: the recommended save period is the best one."""

import pytest

from d9d_loop.planning import goodput


@pytest.mark.parametrize("num_devices", [64, 4096, 16384])
def test_the_save_period_is_close_to_the_best(num_devices: int) -> None:
    found = goodput(num_devices, failures_per_device_day=1e-3)

    def lost(period: float) -> float:
        return 5.0 / period + (period / 2 + 600) / found.failure_seconds

    best = min(map(lost, range(1, 20000)))
    assert lost(found.save_seconds) == pytest.approx(best, rel=0.02)


def test_more_devices_have_less_goodput() -> None:
    few, many = (goodput(count, failures_per_device_day=1e-3) for count in (64, 16384))
    assert many.fraction < few.fraction


def test_goodput_of_one_failure_a_day() -> None:
    """Young's period of sqrt(2 x 50 x 86400) = 2939.4 s, less one save; then the three losses of the docstring."""
    found = goodput(1000, failures_per_device_day=1e-3, save_cost=50.0, restart=900.0)
    assert found.failure_seconds == pytest.approx(86400)
    assert found.save_seconds == pytest.approx(2889.388, rel=1e-6)
    assert found.fraction == pytest.approx(1 / (1 + 50 / 2889.388 + (2889.388 / 2 + 900) / 86400), rel=1e-6)


def test_a_job_that_fails_all_the_time_still_saves_after_as_long_as_a_save_takes() -> None:
    assert goodput(86400, failures_per_device_day=1.0, save_cost=5.0).save_seconds == 5
