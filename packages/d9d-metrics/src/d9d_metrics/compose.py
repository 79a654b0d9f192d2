"""Several metrics that take in the same things, as one."""

from collections.abc import Mapping
from typing import Any, final

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric, MetricValue


@final
class Compose(Metric):
    """Metrics whose `update` takes the same arguments; the value is a mapping of their values.

    Args:
        metrics: The metrics by name. Reported as `quality`, `{"auroc": ...}` becomes `quality/auroc`.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the accumulators of all metrics, as `name/accumulator`."""
        return {
            f"{name}/{key}": accumulator
            for name, metric in self._metrics.items()
            for key, accumulator in metric.accumulators().items()
        }

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update every metric with what is given."""
        for metric in self._metrics.values():
            # The arguments are between the user and the metrics: each kind has an `update` of its own signature.
            metric.update(*args, **kwargs)  # ty: ignore[missing-attribute]

    def compute(self) -> dict[str, MetricValue]:
        """Return the value of every metric by its name."""
        return {name: metric.compute() for name, metric in self._metrics.items()}
