"""Composition of several metrics with the same `update` arguments."""

from collections.abc import Mapping
from typing import Any, final

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric, MetricValue


@final
class Compose(Metric):
    """Several metrics that take the same `update` arguments; the value maps each name to the metric's value.

    Args:
        metrics: Metrics by name. If the composition is reported as `quality`, `{"auroc": ...}` becomes `quality/auroc`.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the accumulators of all metrics, named `metric/accumulator`."""
        return {
            f"{name}/{key}": accumulator
            for name, metric in self._metrics.items()
            for key, accumulator in metric.accumulators().items()
        }

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Call `update` of every metric with the given arguments."""
        for metric in self._metrics.values():
            # `Metric` declares no `update`: each metric defines its own signature.
            metric.update(*args, **kwargs)  # ty: ignore[missing-attribute]

    def compute(self) -> dict[str, MetricValue]:
        """Return the value of every metric by name."""
        return {name: metric.compute() for name, metric in self._metrics.items()}
