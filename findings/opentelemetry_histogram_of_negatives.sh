#!/usr/bin/env bash
# opentelemetry-sdk: A histogram drops negative measurements, though its first bucket is for them.
# Expected: Any finite number can be recorded: the first bucket reaches from minus infinity to 0.
# Happens: A negative number is dropped with a line in the log: rewards and log-likelihoods have a count, sum
#   and mean of the positive ones alone. Gauges take them, and so do up-down counters. Zero is recorded in the
#   bucket up to 0.
# Versions: opentelemetry-sdk 1.45.2, Python 3.11; seen on 2026-11-28.
# Output seen:
#   opentelemetry-sdk 1.45.2
#   recorded -3, -1, 0, 2: count 2, sum 2, min 0, first bucket 1
#   gauge set to -3: -3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" opentelemetry-sdk==1.45.2
"$folder/env/bin/python" - <<'PYTHON'
import logging

import opentelemetry.sdk.version
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

logging.disable(logging.WARNING)
print("opentelemetry-sdk", opentelemetry.sdk.version.__version__)
reader = InMemoryMetricReader()
meter = MeterProvider([reader]).get_meter("finding")
rewards = meter.create_histogram("rewards")
for value in (-3, -1, 0, 2):
    rewards.record(value)
meter.create_gauge("reward").set(-3)
scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
points = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
point = points["rewards"]
seen = point.count, point.sum, point.min, point.bucket_counts[0]
print("recorded -3, -1, 0, 2: count {}, sum {}, min {}, first bucket {}".format(*seen))
print("gauge set to -3:", points["reward"].value)
assert seen == (2, 2, 0, 1) and point.explicit_bounds[0] == 0, f"changed: {seen}"
assert points["reward"].value == -3, "changed: the gauge"
PYTHON
