"""Time of the optimizer against bytes that are counted by hand."""

import pytest

from d9d_loop.planning import Hardware, PlanLayout
from d9d_loop.planning.optimizer_time import STREAM_EFFICIENCY, optimizer_seconds

HARDWARE = Hardware.load("a100-80-dgx")


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        # fp32 weight and two moments, read and written; a gradient that is read three times and written once.
        (PlanLayout(), 6 * 4 + 4 * 4),
        # fp16 weight and gradient; fp32 master weight and two moments.
        (PlanLayout(stored_weight_bytes=2, kept_gradient_bytes=2, master_bytes=12), 2 * 2 + 4 * 2 + 6 * 4),
        # Gradients are reduced in bf16, and kept in fp32.
        (PlanLayout(gradient_bytes=2), 6 * 4 + 4 * 4),
    ],
)
def test_bytes_of_a_parameter(layout: PlanLayout, num_bytes: int) -> None:
    seconds = optimizer_seconds(HARDWARE, layout, 1e9)
    assert seconds * HARDWARE.device.memory_bandwidth * STREAM_EFFICIENCY == pytest.approx(num_bytes * 1e9)
