import math

import pytest
import torch

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss
from d9d_loop.engine.step_totals import StepTotals

CPU = torch.device("cpu")


def _totals(*, on_device: bool) -> StepTotals:
    """Return totals as on a CPU, or as on an accelerator, whose tensors are on the CPU here."""
    totals = StepTotals(CPU)
    if on_device:
        totals._is_on_host, totals._sums = False, torch.zeros(2, dtype=torch.float64)
    return totals


def _reduced(on_device: bool, losses: list[list[tuple[float, float]]]) -> list[float]:
    totals = _totals(on_device=on_device)
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        for total, weight in losses[ctx.rank]:
            totals.add(Loss(torch.tensor(total), torch.tensor(weight) if on_device else weight))
        totals.start_reduction(ctx.group_for("batch", "dp"))
        return [float(value) for value in totals.finish()]


@pytest.mark.parametrize("on_device", [False, True])
def test_sums_over_microbatches_and_ranks(on_device: bool) -> None:
    losses = [[(1.5, 2.0), (0.25, 1.0)], [(3.0, 5.0)]]
    for found in run_ranks(_reduced, on_device, losses, world_size=2):
        assert found == [4.75 / 8.0, 8.0, 1.0 / 8.0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("weight", "expected"), [(0.0, 0.0), (math.nan, math.nan), (4.0, 0.25)])
def test_the_loss_is_divided_by_the_weight_and_is_zero_for_weight_zero(
    on_device: bool, weight: float, expected: float
) -> None:
    totals = _totals(on_device=on_device)
    totals.add(Loss(torch.tensor(2.0), weight))
    loss, _, per_weight = totals.finish()
    assert float(per_weight) == pytest.approx(expected, nan_ok=True)
    assert loss.item() == pytest.approx(2.0 * expected, nan_ok=True)
    assert loss.dtype == torch.float64


def test_a_negative_weight_is_an_error_on_a_cpu_and_nan_on_a_device() -> None:
    for on_device in (False, True):
        totals = _totals(on_device=on_device)
        totals.add(Loss(torch.tensor(2.0), -1.0))
        if on_device:
            assert math.isnan(float(totals.finish()[2]))
        else:
            with pytest.raises(UserError, match=r"the loss weight of the step is -1.0; expected 0 or more"):
                totals.finish()
