import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_state.checkpoint.retention import Retention


@dataclass(frozen=True)
class _Saved:
    step: int
    metric: float | None = None


def _kept(retention: Retention, *saved: _Saved) -> list[int]:
    return sorted(retention.kept({each.step: each.metric for each in sorted(saved, key=lambda each: -each.step)}))


_STEPS = [_Saved(step, metric) for step, metric in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0), (50, 5.0))]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [10, 20, 30, 40, 50]),
        (Retention(last=2), [40, 50]),
        (Retention(last=9), [10, 20, 30, 40, 50]),
        (Retention(last=1, every=20), [20, 40, 50]),
        (Retention(last=1, best=2), [20, 40, 50]),
        (Retention(last=1, best=9), [10, 20, 40, 50]),
        (Retention(last=1, best=1, higher_is_better=True), [50]),
        (Retention(last=1, best=2, higher_is_better=True), [10, 50]),
        (Retention(last=2, every=30, best=1), [20, 30, 40, 50]),
    ],
)
def test_each_rule_keeps_checkpoints(retention: Retention, kept: list[int]) -> None:
    assert _kept(retention, *_STEPS) == kept


def test_newer_checkpoint_wins_ties() -> None:
    equal = [_Saved(step, 1.0) for step in (1, 2, 3)]
    for higher in (False, True):
        assert _kept(Retention(last=1, best=2, higher_is_better=higher), *equal) == [2, 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_non_finite_metric_is_never_best(broken: float, higher: bool, place: int) -> None:
    metrics = [2.0, 1.0]
    metrics.insert(place, broken)
    saved = [_Saved(step, metric) for step, metric in enumerate(metrics, start=1)]
    best = metrics.index(2.0 if higher else 1.0) + 1
    both = [metrics.index(2.0) + 1, metrics.index(1.0) + 1]
    assert _kept(Retention(last=1, best=1, higher_is_better=higher), *saved, _Saved(9)) == [best, 9]
    assert _kept(Retention(last=1, best=3, higher_is_better=higher), *saved, _Saved(9)) == [*both, 9]


def test_newest_and_best_are_always_kept() -> None:
    draws = random.Random(0)  # noqa: S311
    for _ in range(200):
        retention = Retention(last=draws.randrange(1, 3), every=draws.choice([None, 3]), best=draws.randrange(3))
        left: list[_Saved] = []
        best = float("inf")
        for step in range(1, 12):
            metric = draws.choice([None, float(draws.randrange(9))])
            best = min(best, best if metric is None else metric)
            left.append(_Saved(step, metric))
            kept = _kept(retention, *left)
            left = [each for each in left if each.step in kept]
            assert left[-1].step == step
            if retention.best and best < float("inf"):
                assert min(each.metric for each in left if each.metric is not None) == best


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"last": 0}, r"got last = 0; expected an int, at least 1, or None\."),
        ({"last": 1.5}, r"got last = 1\.5; expected an int, at least 1, or None\."),
        ({"last": True}, r"got last = True; expected an int, at least 1, or None\."),
        ({"every": "3"}, r"got every = '3'; expected an int, at least 1, or None\."),
        ({"every": 0}, r"got every = 0; expected an int, at least 1, or None\."),
        ({"best": -1}, r"got best = -1; expected an int, 0 or more\."),
        ({"best": 0.5}, r"got best = 0\.5; expected an int, 0 or more\."),
    ],
)
def test_other_numbers_are_an_error(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Retention(**numbers)
