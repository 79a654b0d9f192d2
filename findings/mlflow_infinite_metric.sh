#!/usr/bin/env bash
# mlflow: An infinite metric comes back as the largest finite number, and NaN as NaN.
# Expected: Both come back as logged, or both are rejected.
# Happens: The database store writes infinity as 1.8e308 and keeps NaN. A filter for values that are not
#   finite finds the second and misses the first; means and plots of the metric take the number for a value.
# Versions: mlflow-skinny 3.17.2, sqlalchemy 2.1.9, alembic 1.20.1, Python 3.11; seen on 2026-11-28.
# Output seen:
#   mlflow 3.17.2
#   inf -> 1.7976931348623157e+308, finite: True
#   -inf -> -1.7976931348623157e+308, finite: True
#   nan -> nan, finite: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1
"$folder/env/bin/python" - <<'PYTHON'
import math
import os
import tempfile

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow

print("mlflow", mlflow.__version__)

with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    with mlflow.start_run() as run:
        for name in ("inf", "-inf", "nan"):
            mlflow.log_metric(name.replace("-", "minus_"), float(name), step=1)
    seen = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
for name in ("inf", "-inf", "nan"):
    value = seen[name.replace("-", "minus_")]
    print(f"{name} -> {value}, finite: {math.isfinite(value)}")
    assert math.isfinite(value) is (name != "nan"), f"changed: {name}"
PYTHON
