import math

import pytest
import torch

from d9d_metrics import Max, Min, Sum, WeightedMean


def test_sum_adds_numbers_and_whole_tensors_in_float64() -> None:
    metric = Sum()
    metric.update(1)
    metric.update(torch.full((1000,), 0.1, dtype=torch.float32))
    assert metric.compute().item() == pytest.approx(1 + 1000 * float(torch.tensor(0.1)), rel=1e-15)


def test_weighted_mean_divides_totals_by_weights() -> None:
    metric = WeightedMean()
    metric.update(torch.tensor(10.0), torch.tensor(2))
    metric.update(torch.tensor(3.0), torch.tensor(1))
    assert metric.compute().item() == 13 / 3


@pytest.mark.parametrize(("total", "expected"), [(0.0, 0.0), (3.0, 3.0), (math.inf, math.inf)])
def test_weighted_mean_with_weight_zero_is_the_total(total: float, expected: float) -> None:
    metric = WeightedMean()
    metric.update(total, 0)
    assert metric.compute().item() == expected


def test_weighted_mean_propagates_nan() -> None:
    metric = WeightedMean()
    metric.update(math.nan, 0)
    assert metric.compute().isnan()


def test_max_and_min_accept_numbers_tensors_and_empty_tensors() -> None:
    largest, smallest = Max(), Min()
    for values in (2.0, torch.tensor([[-1.0, 5.0]]), torch.empty(0)):
        largest.update(values)
        smallest.update(values)
    assert (largest.compute().item(), smallest.compute().item()) == (5.0, -1.0)


def test_extremes_without_data_are_infinite() -> None:
    assert (Max().compute().item(), Min().compute().item()) == (-math.inf, math.inf)


@pytest.mark.parametrize("metric", [Sum(), Max(), Min()])
def test_a_computed_value_does_not_change_later(metric: Sum | Max | Min) -> None:
    metric.update(1.0)
    value = metric.compute()
    metric.reset()
    assert value.item() == 1.0
