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
