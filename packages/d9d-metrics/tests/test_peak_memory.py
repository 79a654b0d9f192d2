import pytest
import torch

from d9d_metrics import PeakMemory
from d9d_metrics.peak_memory import peak_bytes


def test_on_cpu_the_peak_memory_of_the_process_is_measured() -> None:
    metric = PeakMemory()
    assert metric.compute().item() == 0.0
    held = torch.ones(2**25 // 4)
    before = peak_bytes(torch.device("cpu"))
    metric.update()
    assert before / 2**30 <= metric.compute().item() < 64
    assert before > held.nbytes
    metric.reset()
    assert metric.compute().item() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_reset_starts_a_new_peak() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    metric = PeakMemory().to(device)
    torch.ones(2**28, dtype=torch.uint8, device=device)
    metric.update()
    assert metric.compute().item() >= 0.25
    metric.reset()
    metric.update()
    assert metric.compute().item() < 0.25
