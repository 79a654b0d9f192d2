import copy
from collections.abc import Callable
from typing import Any

import numpy as np
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


class _CountsElsewhere(Metric):
    """A metric with an accumulator, and a count in another attribute."""

    def __init__(self, start: Any) -> None:
        self.total, self.count = Accumulator("sum"), start

    def update(self, change: Callable[[Any], Any]) -> None:
        self.total.update(1.0)
        self.count = change(self.count)

    def compute(self) -> Tensor:
        return self.total.value


def _append(seen: list[float]) -> list[float]:
    seen.append(1.0)
    return seen


def _count_by_name(counts: dict[str, Any]) -> dict[str, Any]:
    counts["right"] = counts.get("right", 0) + 1
    return counts


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "number": (0, lambda count: count + 1),
    "list": ([], _append),
    "counts in a list": ([0, 0], lambda counts: [counts[0], counts[1] + 1]),
    "dict": ({}, _count_by_name),
    "dict of tensors": ({"right": torch.zeros(())}, lambda counts: {"right": counts["right"].add_(1)}),
    "set": (set(), lambda seen: seen | {len(seen)}),
    "tensor": (torch.zeros(()), lambda count: count + 1),
    "tensor in place": (torch.zeros(()), lambda count: count.add_(1)),
    "array": (np.zeros(2), lambda counts: counts + 1),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_state_outside_of_accumulators_is_an_error(kind: str) -> None:
    start, change = CHANGES[kind]
    metric = _CountsElsewhere(copy.deepcopy(start))
    metric.update(change)
    with pytest.raises(UserError, match="update of _CountsElsewhere changed count; expected changes of accumulators"):
        metric.update(change)


class _HasWorkspace(Metric):
    not_state = ("workspace",)

    def __init__(self) -> None:
        self.total, self.workspace = Accumulator("sum"), torch.zeros(2)

    def update(self, x: Tensor) -> None:
        self.total.update(torch.mul(x, 2, out=self.workspace).sum())

    def compute(self) -> Tensor:
        return self.total.value


def test_a_metric_may_name_attributes_that_are_not_its_state() -> None:
    metric = _HasWorkspace()
    for value in range(4):
        metric.update(torch.full((2,), float(value)))
    assert metric.compute() == 24


SETTINGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "the last batch, for display": (None, lambda last: torch.zeros(3)),
    "a table that is made once": ({}, lambda tables: tables if tables else {"float64": torch.zeros(3)}),
    "a table of the device": (torch.zeros(3), lambda table: table.to("cpu")),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_tensors_may_be_attributes(kind: str) -> None:
    start, change = SETTINGS[kind]
    metric = _CountsElsewhere(start)
    for _ in range(3):
        metric.update(change)
    assert metric.compute() == 3.0


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
