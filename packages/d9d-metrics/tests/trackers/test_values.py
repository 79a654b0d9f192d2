import io
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_metrics import Histogram, Image, Text
from d9d_metrics.trackers.values import Tracked, from_json, to_json


@pytest.mark.parametrize(
    "value", [1.5, -math.inf, Histogram(-1.0, 1.0, (1.0, 0.0)), Text("größe"), Image(b"\x89PNG\xff\x00")]
)
def test_values_round_trip_through_json(value: Tracked) -> None:
    assert from_json(json.loads(json.dumps(to_json(value), allow_nan=False))) == value


def test_nan_round_trips_through_json() -> None:
    again = from_json(to_json(math.nan))
    assert isinstance(again, float)
    assert math.isnan(again)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), num_bins=st.integers(1, 10))
def test_a_histogram_counts_every_value_once(values: list[float], num_bins: int) -> None:
    histogram = Histogram.of(torch.tensor(values, dtype=torch.float64), num_bins=num_bins)
    assert sum(histogram.counts) == len(values)
    assert histogram.low <= min(values) <= max(values) <= histogram.high
    assert len(histogram.edges) == num_bins + 1
    assert list(histogram.edges) == sorted(histogram.edges)


def test_a_histogram_ignores_non_finite_values() -> None:
    histogram = Histogram.of(torch.tensor([[0.0, math.nan], [4.0, math.inf]]).bfloat16(), num_bins=2)
    assert histogram == Histogram(0.0, 4.0, (1.0, 1.0))
    assert Histogram.of(torch.empty(0), num_bins=2) == Histogram(-0.5, 0.5, (0.0, 0.0))


def test_renders_a_figure() -> None:
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    picture = Image.of(Figure(figsize=(2, 1), dpi=50))
    assert imread(io.BytesIO(picture.png)).shape[:2] == (50, 100)
