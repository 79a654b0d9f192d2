import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics import Accumulator, Max, Metric, Sum, WeightedMean


def test_state_dict_round_trip() -> None:
    saved = WeightedMean()
    saved.update(6.0, 4.0)
    loaded = WeightedMean()
    loaded.load_state_dict(saved.state_dict())
    loaded.update(2.0, 4.0)
    assert loaded.compute().item() == 1.0
    assert saved.compute().item() == 1.5


def test_a_state_dict_is_a_copy() -> None:
    metric = Sum()
    state = metric.state_dict()
    metric.update(1.0)
    assert state["total"].item() == 0.0


def test_rejects_the_state_of_another_metric_and_is_unchanged() -> None:
    metric = WeightedMean()
    metric.update(6.0, 4.0)
    message = (
        r"got the tensors \{'total': \(\)\} as the state of a WeightedMean; expected \{'total': \(\), 'weight': \(\)\}"
    )
    with pytest.raises(UserError, match=message):
        metric.load_state_dict(Sum().state_dict())
    assert metric.compute().item() == 1.5


def test_rejects_a_state_of_another_shape() -> None:
    with pytest.raises(
        UserError, match=r"got the tensors \{'total': \(2,\)\} as the state of a Sum; expected \{'total': \(\)\}"
    ):
        Sum().load_state_dict({"total": torch.zeros(2, dtype=torch.float64)})


def test_reset_clears_the_state() -> None:
    metric = WeightedMean()
    metric.update(6.0, 4.0)
    metric.reset()
    metric.update(3.0, 1.0)
    assert metric.compute().item() == 3.0


def test_moves_to_a_device_in_place() -> None:
    metric = Max()
    assert metric.to("meta") is metric
    assert metric.compute().device.type == "meta"


class _AlmostEqual(Metric):
    def __init__(self) -> None:
        self._total, self.total = Accumulator("sum"), Accumulator("sum")

    def update(self, value: float) -> None:
        self._total.update(value)
        self.total.update(1)

    def compute(self) -> torch.Tensor:
        return self._total.value / self.total.value


def test_names_that_differ_only_in_underscores_are_an_error() -> None:
    with pytest.raises(UserError, match="attributes of _AlmostEqual differ only in leading underscores; rename one"):
        _AlmostEqual().reset()


class _InAList(Metric):
    def __init__(self) -> None:
        self._counts = [Accumulator("count")]

    def compute(self) -> torch.Tensor:
        return self._counts[0].value


def test_a_metric_without_accumulators_as_attributes_is_refused() -> None:
    with pytest.raises(UserError, match=r"_InAList has no accumulators as attributes.* Override accumulators\(\)"):
        _InAList().reset()


class _CountsInNumbers(Metric):
    def __init__(self) -> None:
        self.total, self.count, self.seen = Accumulator("sum"), 0, list[float]()

    def update(self, value: float, *, as_list: bool) -> None:
        self.total.update(value)
        if as_list:
            self.seen.append(value)
        else:
            self.count += 1

    def compute(self) -> Tensor:
        return self.total.value


@pytest.mark.parametrize(("as_list", "name"), [(False, "count"), (True, "seen")])
def test_state_outside_of_accumulators_is_an_error(as_list: bool, name: str) -> None:
    metric = _CountsInNumbers()
    metric.update(1.0, as_list=as_list)
    with pytest.raises(UserError, match=f"update of _CountsInNumbers changed {name}; expected changes of accumulators"):
        metric.update(1.0, as_list=as_list)


class _HasSettings(Metric):
    """A metric with a NaN, a flag and a size that the first update sets."""

    def __init__(self) -> None:
        self.total, self.fill, self.has_warned, self.size = Accumulator("sum"), float("nan"), False, 0

    def update(self, value: float) -> None:
        self.total.update(value)
        self.has_warned, self.size = not self.has_warned, 3

    def compute(self) -> Tensor:
        return self.total.value


def test_settings_may_be_attributes() -> None:
    metric = _HasSettings()
    for _ in range(3):
        metric.update(1.0)
    assert metric.compute() == 3
