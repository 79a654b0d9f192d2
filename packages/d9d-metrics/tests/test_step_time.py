import pytest
import torch

from d9d_metrics import StepClock, StepTime, Throughput
from d9d_metrics.step_clock import StepSeconds


class _Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_clock_measures_data_wait_and_communication() -> None:
    now = _Time()
    clock = StepClock(torch.device("cpu"), now=now)
    found = []
    for step in range(2):
        with clock.data_wait():
            now.now += 1 + step
        now.now += 4
        for _ in range(2):
            with clock.communication():
                now.now += 0.5
        found += clock.step()
        now.now += 50  # an evaluation
        clock.skip()
    now.now += 7
    found += clock.step()
    assert found == [StepSeconds(6.0, 1.0, 1.0), StepSeconds(7.0, 2.0, 1.0), StepSeconds(7.0, 0.0, 0.0)]


def test_step_time_is_a_mean_whose_parts_add_up() -> None:
    metric = StepTime()
    metric.update(StepSeconds(6.0, 1.0, 2.0))
    metric.update(StepSeconds(10.0, 0.0, 4.0))
    values = {name: value.item() for name, value in metric.compute().items()}
    assert values == {"seconds": 8.0, "data_wait": 0.5, "communication": 3.0, "compute": 4.5, "slowest": 10.0}


def test_without_data_all_times_and_the_throughput_are_zero() -> None:
    assert {value.item() for value in StepTime().compute().values()} == {0.0}
    assert Throughput().compute().item() == 0.0


def test_throughput_is_items_over_seconds() -> None:
    metric = Throughput()
    metric.update(torch.tensor(10), 1.0)
    metric.update(20, 3.0)
    assert metric.compute().item() == 7.5
    restored = Throughput()
    restored.load_state_dict(metric.state_dict())
    restored.update(0, 1.0)
    assert restored.compute().item() == 6.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_communication_on_a_device_is_returned_later() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    clock, known = StepClock(device), []
    for _ in range(3):
        with clock.communication():
            torch.ones(2**12, 2**12, device=device).square().sum()
        known += clock.step()
    torch.accelerator.synchronize()
    known += clock.step()
    assert len(known) == 4
    assert all(step.communication > 0 for step in known[:3])
