#!/usr/bin/env bash
# prometheus_client: The minimum of a gauge over processes is 0 because of the process that only defines it.
# Expected: A process that never sets a gauge has no part in its minimum, as it has none in the most recent
#   value.
# Happens: Defining a gauge without labels writes 0 for the process, so the parent that imports the module and
#   forks the workers makes every minimum of positive values 0, and every maximum of negative ones. With a
#   label the value exists only once it is set, and the minimum is right.
# Versions: prometheus-client 0.26.0, Python 3.11; seen on 2026-11-28.
# Output seen:
#   prometheus_client 0.26.0
#   gauge without labels: min 0.0, mostrecent 3.0
#   gauge with a label: min 3.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" prometheus-client==0.26.0
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import os
import tempfile

folder = tempfile.TemporaryDirectory()
os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder.name
from prometheus_client import CollectorRegistry, Gauge, multiprocess

print("prometheus_client", importlib.metadata.version("prometheus-client"))
lowest = Gauge("lowest", "Set by workers", multiprocess_mode="min")
recent = Gauge("recent", "Set by workers", multiprocess_mode="mostrecent")
labeled = Gauge("labeled", "Set by workers", ["part"], multiprocess_mode="min")
for value in (5, 3):
    if os.fork() == 0:
        for gauge in (lowest, recent, labeled.labels("a")):
            gauge.set(value)
        os._exit(0)
    os.wait()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
seen = {metric.name: metric.samples[0].value for metric in registry.collect()}
folder.cleanup()
print("gauge without labels: min {lowest}, mostrecent {recent}".format(**seen))
print("gauge with a label: min {labeled}".format(**seen))
assert seen == {"lowest": 0.0, "recent": 3.0, "labeled": 3.0}, f"changed: {seen}"
PYTHON
